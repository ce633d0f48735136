"""The snapshot of a planned step, without torch: its events are the requests of the plan, and its segment is what is left."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from build import Step, random_step

from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan, simulate
from lightning_memopt.plan.allocator.reserved import described
from lightning_memopt.plan.snapshot import dump, snapshot
from lightning_memopt.solvers import planner

BASE, PAGE = 1 << 32, 2 << 20


def plan_of(graph: Graph) -> Plan:
    frontier = planner.solve(graph)
    return frontier.plan(frontier.smallest_nbytes)


@pytest.mark.parametrize("seed", range(20))
def test_events_and_blocks(seed: int) -> None:
    """Peak as predicted; no two blocks overlap; a block lies at the lowest address that is free; the last ones are left."""
    graph = random_step(random.Random(seed), 14)
    plan = plan_of(graph)
    shot = snapshot(graph, plan)
    assert set(shot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    (segment,), (trace,) = shot["segments"], shot["device_traces"]
    resident = [nbytes for _, nbytes in described(graph, plan.lives).resident if nbytes]
    blocks: dict[int, int] = {}

    def put(nbytes: int) -> int:
        """The lowest address at which this many bytes are free."""
        ends = (BASE, *(address + size for address, size in blocks.items()))
        at = min(a for a in ends if all(a + nbytes <= b or b + size <= a for b, size in blocks.items()))
        blocks[at] = nbytes
        return at

    for nbytes in resident:
        put(nbytes)
    peak = sum(resident)
    for event in trace:
        assert event["stream"] == 0 and event["frames"]
        if event["action"] == "alloc":
            assert event["addr"] == put(event["size"])
            peak = max(peak, sum(blocks.values()))
        elif event["action"] == "free_completed":
            assert blocks.pop(event["addr"]) == event["size"]
        else:
            assert event["action"] == "free_requested" and blocks[event["addr"]] == event["size"]
    assert peak == plan.predicted.peak_nbytes == simulate(graph, plan.lives).predicted.peak_nbytes
    active = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert {block["address"]: block["size"] for block in active} == blocks
    assert all(block["requested_size"] == block["size"] and block["frames"] for block in active)
    filled(segment, sum(blocks.values()))


def filled(segment: dict[str, Any], held_nbytes: int) -> None:
    """The blocks of a segment fill it without gaps, and its sums are theirs."""
    address = BASE
    for block in segment["blocks"]:
        assert block["address"] == address and block["size"] > 0
        assert block["state"] == "active_allocated" or (block["requested_size"], block["frames"]) == (0, [])
        address += block["size"]
    assert address - BASE == segment["total_size"] and segment["total_size"] % PAGE == 0
    assert [segment[key] for key in ("allocated_size", "active_size", "requested_size")] == [held_nbytes] * 3
    assert (segment["address"], segment["device"], segment["stream"]) == (BASE, 0, 0)
    # keys that torch's viewer asks for
    assert (segment["segment_type"], segment["segment_pool_id"], segment["is_expandable"]) == ("large", (0, 0), False)
    assert segment["frames"] == []


def test_frames_and_times() -> None:
    """What the bytes are, then the op that asks for them; a rebuild takes its time before the point that asks for it."""
    step = Step()
    t = step.given(100)
    for i in range(9):
        (t,) = step.op(t, makes=(1000,), saves=("out",), name=f"aten::op{i}", scope=f"block.{i}", seconds=1.0, workspace=8)
    graph = step.build()
    plan = plan_of(graph)
    (trace,) = snapshot(graph, plan)["device_traces"]
    first = next(event for event in trace if event["action"] == "alloc")
    assert [(frame["name"], frame["filename"]) for frame in first["frames"]] == [
        ("aten::op0 0", "activation"),
        ("aten::op0", "block.0"),
    ]
    names = [event["frames"][0]["filename"] for event in trace]
    assert "rebuilt or fetched for backward" in names and "of the step" in names
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)
    took = sum(op.seconds for op in graph.ops) + plan.predicted.extra_seconds  # backward ops take no time in this step
    assert plan.predicted.extra_seconds > 0 and 1e6 * took <= times[-1] <= 1e6 * took + len(trace)


def test_it_is_written_and_a_wrong_path_is_named(tmp_path: Path) -> None:
    graph = random_step(random.Random(3), 8)
    plan = plan_of(graph)
    dump(graph, plan, tmp_path / "step.pickle")
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()) == snapshot(graph, plan)
    with pytest.raises(ConfigError, match=r"cannot be written to .*nowhere.*: No such file or directory"):
        dump(graph, plan, tmp_path / "nowhere" / "step.pickle")
