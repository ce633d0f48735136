"""A planned step as a memory snapshot that torch's own viewer reads: the format of `torch.cuda.memory._dump_snapshot`.

The events are simulated, from the plan and the step that it was made for: every allocation and free that the planned step
requests, in order, at the times that were measured or predicted for its ops. Sizes are those requested and add up to the plan's
predicted peak. Each allocation gets the lowest free address, not the one that a device would give. A frame of an event names
the op and, instead of a file, the module.

Drop the file on pytorch.org/memory_viz, or draw it with `torch.cuda._memory_viz` (run as a module: `trace_plot
snapshot.pickle -o step.html`).

Source: `torch.cuda._memory_viz`, `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import pickle  # only written, never read: the viewer takes no other format
from bisect import insort
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import Graph
from lightning_memopt.plan.allocator import Described, Name, described
from lightning_memopt.plan.lower import Rebuild, lower
from lightning_memopt.plan.model import Plan
from lightning_memopt.plan.updates import step_of

_PAGE_NBYTES = 2 << 20
_BASE = 1 << 32
"""The first address, chosen to look like one of a device."""
Frames = list[dict[str, Any]]


class _Addresses:
    """Gives each block the lowest address at which it fits."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, int]] = []
        """(address, bytes, number of the entry in `frames`), by address."""
        self.frames: list[Frames] = []
        self.top = _BASE

    def alloc(self, nbytes: int, frames: Frames) -> int:
        at = _BASE
        for address, size, _ in self.blocks:
            if address - at >= nbytes:
                break
            at = address + size
        self.frames.append(frames)
        insort(self.blocks, (at, nbytes, len(self.frames) - 1))
        self.top = max(self.top, at + nbytes)
        return at

    def free(self, address: int) -> None:
        self.blocks = [block for block in self.blocks if block[0] != address]


def snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """The snapshot of one step under a plan: keys `segments` (at the end of the step) and `device_traces` (its events)."""
    graph = step_of(graph, plan)
    requests = described(graph, plan.lives)
    clock = _microseconds(graph, plan)
    addresses, trace, live = _Addresses(), list[dict[str, Any]](), dict[object, tuple[int, int, Frames]]()
    for tensor, nbytes in requests.resident:
        if nbytes:
            frames = _frames(graph, requests, tensor)
            live[tensor] = (addresses.alloc(nbytes, frames), nbytes, frames)
    for moment, ((name, nbytes), point) in enumerate(zip(requests.actions, requests.points, strict=True)):
        time_us = clock[point] + moment  # a microsecond apart: a viewer orders events by it
        if nbytes > 0:
            frames = _frames(graph, requests, name, point)
            live[name] = (addresses.alloc(nbytes, frames), nbytes, frames)
            trace.append(_event("alloc", live[name], time_us))
        elif nbytes < 0 and name in live:
            block = live.pop(name)
            addresses.free(block[0])
            trace += [_event("free_requested", block, time_us), _event("free_completed", block, time_us)]
    return {
        "segments": [_segment(addresses)] if addresses.frames else [],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def dump(graph: Graph, plan: Plan, path: str | Path) -> None:
    """Write the snapshot of a planned step to `path`. Raises ConfigError if the file cannot be written."""
    data = pickle.dumps(snapshot(graph, plan))
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"the snapshot cannot be written to {path}: {error.strerror}. Give another path.") from None


def _microseconds(graph: Graph, plan: Plan) -> list[int]:
    """When each point begins. Ops take the time that was measured. Ops that run again at a point take it before the point
    begins.
    """
    took = [0.0] * len(graph.points)
    for op in graph.ops:
        took[op.at] += op.seconds
    for point, steps in lower(graph, plan.lives).segments.items():
        took[point] += sum(graph.ops[step.op].seconds for step in steps if isinstance(step, Rebuild))
    return [int(1e6 * seconds) for seconds in accumulate([0.0, *took[:-1]])]


def _event(action: str, block: tuple[int, int, Frames], time_us: int) -> dict[str, Any]:
    address, nbytes, frames = block
    return {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us, "frames": frames}


def _frames(graph: Graph, requests: Described, name: Name, point: int | None = None) -> Frames:
    """Two frames: the first says what the bytes are, the second which point of the step allocates them."""
    op = graph.points[point].id if point is not None and graph.points[point].kind == "op" else None
    asked = [_frame(graph.ops[op].name, graph.ops[op].scope)] if op is not None else []
    if isinstance(name, int) and name < len(graph.tensors):
        return [_frame(graph.tensors[name].name, str(graph.tensors[name].kind)), *asked]
    if name in requests.again:
        return [_frame(graph.tensors[requests.again[name]].name, "rebuilt or fetched for backward"), *asked]
    if isinstance(name, tuple):
        return [_frame(f"{name[0]} {name[1]}", "of the plan"), *asked]
    return [_frame("workspace" if name == "workspace" else "gathered weight", "of the step"), *asked]


def _frame(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "filename": where or "the model itself", "line": 0}


def _segment(addresses: _Addresses) -> dict[str, Any]:
    """One segment with the blocks that are in memory when the step is over."""
    total = -(-(addresses.top - _BASE) // _PAGE_NBYTES) * _PAGE_NBYTES
    blocks: list[dict[str, Any]] = []
    at = _BASE
    for address, nbytes, number in addresses.blocks:
        if address > at:
            blocks.append(_block(at, address - at, "inactive", []))
        blocks.append(_block(address, nbytes, "active_allocated", addresses.frames[number]))
        at = address + nbytes
    if at < _BASE + total:
        blocks.append(_block(at, _BASE + total - at, "inactive", []))
    held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": _BASE,
        "total_size": total,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, nbytes: int, state: str, frames: Frames) -> dict[str, Any]:
    requested = nbytes if state == "active_allocated" else 0
    return {"address": address, "size": nbytes, "requested_size": requested, "state": state, "frames": frames}
