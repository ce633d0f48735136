"""What is there after a step of a long run, and how much of it grows: samples, their slopes, and what is allowed.

The growth of a quantity is the slope of the lines of least squares through its samples, without those of the first fifth,
times the steps from the first to the last of them. There is a line for each kind of samples, all with one slope: where another
plan is in force, there are other objects and threads, and nothing has grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import counter
from lightning_memopt.plan.rates import Coding, Link, MachineRates
from lightning_memopt.record import StorageVersion, Tape
from lightning_memopt.runtime import Handle, Kept, PlannedEngine
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.session import times

EVERY = 25
"""Number of steps from one sample to the next."""
LEAST = 8
"""Of fewer samples no growth is said."""
ALLOWED: dict[str, float] = {
    "resident_nbytes": 1 << 20,
    "heap_nbytes": 1 << 16,
    "objects": 10,
    "python_blocks": 40,
    "references_to_none": 10,
    "files_on_disk": 1,
}
"""The most that a quantity may grow by; nothing for those that are not here. Python makes objects of its own now and then, and
a checkpoint whose writing was interrupted lies there until the next is written. What is left by each departure, or by each
exception, of 5,000 steps exceeds these numbers.
"""
NAMES = {
    "tensor_nbytes": "bytes of tensors",
    "resident_nbytes": "resident bytes of the process without those of files, after `malloc_trim`",
    "heap_nbytes": "bytes that `malloc` has given out",
    "objects": "objects that the garbage collector knows",
    "our_objects": "tapes, engines, handles and storage versions among them",
    "python_blocks": "blocks of Python's allocator",
    "references_to_none": "references to `None`",
    "references_to_classes": "references to our classes: one for each object of them, known to the collector or not",
    "threads": "threads of Python",
    "system_threads": "threads of the process",
    "files": "open files",
    "files_on_disk": "files in the folder of the run",
    "hooks": "hooks and modes",
    "states": "plan states",
    "parked_nbytes": "bytes in tiers",
}
"""What a sample has."""
_OURS = Tape, PlannedEngine, Handle, Kept, StorageVersion

_LINK = Link(out_bytes_per_second=1e8, in_bytes_per_second=1e8)
_FAST = Coding(encode_bytes_per_second=1e12, decode_bytes_per_second=1e12)
RATES = MachineRates(name="a slow disk, fast codecs", links={"disk": _LINK}, codecs={"positive": _FAST, "bools": _FAST})


class _Times(times.Times):
    def of_transfers(self, measure: Any) -> MachineRates:
        return RATES


@contextlib.contextmanager
def fixed_rates() -> Iterator[None]:
    """Plans solved in this block take links and codecs to be as fast as `RATES` says, so that they park and encode."""
    before, times.current = times.current, _Times()
    try:
        yield
    finally:
        times.current = before


def hooks(model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Hooks for all modules and optimizers, saved-tensor hooks, dispatch modes, and the collector's callbacks; and those of
    this model, its modules and parameters, and of this optimizer.
    """
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    count = sum(len(getattr(modules, f"_global_{name}")) for name in names)
    count += len(optimizers._global_optimizer_pre_hooks) + len(optimizers._global_optimizer_post_hooks)
    saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
    count += (saving is not None) + len(_get_current_dispatch_mode_stack()) + len(gc.callbacks)
    for module in model.modules() if model is not None else ():
        count += sum(len(getattr(module, f"_{name}")) for name in names)
    for p in model.parameters() if model is not None else ():
        count += len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
    if optimizer is not None:
        count += len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return count


class _Heap(ctypes.Structure):
    """What `mallinfo2` of glibc answers."""

    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _memory() -> tuple[int, int]:
    """Resident bytes without those of files, whose pages stay once they were read; and bytes that `malloc` has given out, 0
    where this is not glibc.
    """
    libc, heap_nbytes = ctypes.CDLL(None), 0
    with contextlib.suppress(AttributeError):
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _Heap
        heap = libc.mallinfo2()
        heap_nbytes = heap.uordblks + heap.hblkhd
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024, heap_nbytes


def depots_of_plans(run: Run) -> list[Depot]:
    """The depots in which the plans of a run park saved tensors."""
    return [depot for _, depot in run.session._offloading.depots._of_plan.values() if depot is not None]


def sample(
    run: Run | None, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, folder: Path | None = None
) -> dict[str, int]:
    """What is there after a step. `run`: None where the model trains plainly. `folder`: where the run puts its files. Linux
    alone.
    """
    gc.collect()
    counts = counter()
    parked_nbytes = 0
    if run is not None:
        parked_nbytes = sum(depot.used_nbytes for depot in depots_of_plans(run))
    objects = gc.get_objects()
    ours = sum(type(o) in _OURS for o in objects)
    number = len(objects)
    del objects
    resident_nbytes, heap_nbytes = _memory()
    return {
        "tensor_nbytes": counts.live_nbytes if counts is not None else 0,
        "resident_nbytes": resident_nbytes,
        "heap_nbytes": heap_nbytes,
        "objects": number,
        "our_objects": ours,
        "python_blocks": sys.getallocatedblocks(),
        "references_to_none": sys.getrefcount(None),
        "references_to_classes": sum(map(sys.getrefcount, _OURS)),
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "files_on_disk": 0 if folder is None else sum(1 for path in folder.rglob("*") if path.is_file()),
        "hooks": hooks(model, optimizer),
        "states": 0 if run is None else len(run.session._plan_cache),
        "parked_nbytes": parked_nbytes,
    }


class Samples:
    """`count` samples, in memory that is there from the beginning: they do not grow themselves.

    warm: number of steps at the beginning whose growth is not counted, because things are allocated for the first time.
    values: quantity -> its values.
    """

    def __init__(self, count: int, warm: int) -> None:
        self.count, self.warm = 0, warm
        self._room = count
        self.values: dict[str, array[int]] = {}
        self._kinds: dict[Hashable, int] = {}
        self._kind_of = array("q", bytes(8 * count))

    def take(self, quantities: dict[str, int], kind: Hashable = None) -> None:
        """`kind`: samples of another one may differ in anything."""
        self._kind_of[self.count] = self._kinds.setdefault(kind, len(self._kinds))
        for name, value in quantities.items():
            if name not in self.values:
                self.values[name] = array("q", bytes(8 * self._room))
            self.values[name][self.count] = value
        self.count += 1

    @property
    def ends(self) -> dict[str, list[int]]:
        """The first and the last value of each quantity."""
        return {name: [values[0], values[self.count - 1]] for name, values in self.values.items()}

    def growth(self) -> dict[str, float]:
        """How much each quantity grows, after the first fifth, and after the first steps in any case. Empty where there are too
        few steps to say so.
        """
        begin = max(self.count // 5, self.warm // EVERY)
        if self.count - begin < LEAST:
            return {}
        kinds = self._kind_of[begin : self.count]
        return {name: round(growth(values[begin : self.count], kinds), 1) for name, values in self.values.items()}


def growth(values: Sequence[int], kinds: Sequence[int] = ()) -> float:
    """Of the lines of least squares through the values of each kind, all with one slope, from the first to the last value."""
    places: dict[int, list[int]] = defaultdict(list)
    for i, kind in enumerate(kinds or [0] * len(values)):
        places[kind].append(i)
    with_time = of_time = 0.0
    for at in places.values():
        middle, mean = sum(at) / len(at), sum(values[i] for i in at) / len(at)
        with_time += sum((i - middle) * (values[i] - mean) for i in at)
        of_time += sum((i - middle) ** 2 for i in at)
    return with_time / of_time * (len(values) - 1) if of_time else 0.0


def leaks(grown: dict[str, float], **allowed: float) -> list[str]:
    """The quantities that grow more than they may. `allowed`: used instead of `ALLOWED`, by quantity."""
    return [name for name, value in grown.items() if value > (ALLOWED | allowed).get(name, 0)]


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Name of a column -> its "growth" and "first_and_last", as Markdown: a row a quantity."""
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in next(iter(columns.values()))["growth"]:
        cells = (f"{r['growth'][name] + 0.0:+,.1f} ({r['first_and_last'][name][1]:,})" for r in columns.values())
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
