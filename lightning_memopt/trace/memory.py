"""What the allocator says: the peak of a step, and what each op takes beyond its outputs.

CPU: the native counter (counted.py). Where there is none, torch's own allocator events (`torch.profiler`,
`profile_memory=True`), in order, with marks around the ops.
CUDA: the caching allocator's statistics and events on the stream, around each op. The bytes are those that were requested:
whole blocks, which torch counts as allocated, may be larger by up to 1 MiB each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memopt.native import Counter, Window, counter
from lightning_memopt.torch_private import KINETO_PROFILE, profiler_is_on, record_function
from lightning_memopt.trace.counted import Marks

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler otherwise writes two lines to stderr a step that is metered
_MARK = "memopt#"


def _profiler_mark(index: int) -> Any:
    return record_function(f"{_MARK}{index}")


@dataclass
class AllocatorEvents:
    """Filled when the metered block ends: `peak_nbytes` above its start, `workspaces` op index -> bytes beyond its net.

    `mark(index)` goes around every op. `profiled`: by torch's profiler.
    """

    available: bool = True
    profiled: bool = False
    peak_nbytes: int = 0
    workspaces: dict[int, int] = field(default_factory=dict)
    mark: Callable[[int], Any] = _profiler_mark


def requested_nbytes(device: torch.device) -> tuple[int, int]:
    """Bytes that are allocated on a CUDA device, as they were requested: now, and the most since peaks were reset."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found = stats.get("requested_bytes") or stats["allocated_bytes"]  # other allocators do not know what was requested
    return int(found["all"]["current"]), int(found["all"]["peak"])


class CudaOps:
    """What each op takes on a CUDA device: time between events on its stream, read when all have run, and bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_nbytes = 0
        """The most that the last op had allocated beyond what there was before."""
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before = 0

    def begin(self, index: int) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = requested_nbytes(self.device)[0]
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events[index:] = [pair]  # an op that raised has no end
        pair[0].record(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        self._events[-1][1].record(torch.cuda.current_stream(self.device))
        self.peak_nbytes = requested_nbytes(self.device)[1] - self._before

    def seconds(self, count: int) -> list[float]:
        """Of the first ops."""
        torch.cuda.synchronize(self.device)
        return [1e-3 * began.elapsed_time(ended) for began, ended in self._events[:count]]


@contextlib.contextmanager
def metered_cpu() -> Iterator[AllocatorEvents]:
    """Measure the CPU allocator in this block. By the profiler, nothing is measured where another one is running or about to
    (`available`), and the end of memory that was allocated before the block is not seen.
    """
    counts = counter()
    whole, ops = (counts.window(), counts.window(plain=True)) if counts is not None else (None, None)
    if counts is not None and whole is not None and ops is not None:
        with _counted(counts, whole, ops) as events:
            yield events
    else:
        with _profiled() as events:
            yield events


@contextlib.contextmanager
def _counted(counts: Counter, whole: Window, ops: Window) -> Iterator[AllocatorEvents]:
    began, marks = whole.reset(), Marks(ops)
    found = AllocatorEvents(mark=marks, workspaces=marks.workspaces)
    try:
        yield found
    finally:
        marks.close()
        found.peak_nbytes = whole.peak_nbytes - began
        found.available = bool(counts.installed())
        whole.close()


@contextlib.contextmanager
def _profiled() -> Iterator[AllocatorEvents]:
    """A span that torch began in this block (`record_function`: every `Optimizer.step`, every node of backward) and that ends
    after it, while a later such block runs, writes to memory that is no longer there: none may begin before it has ended.
    """
    found = AllocatorEvents(profiled=True)
    if profiler_is_on() or _others():  # torch would start a second one without a word, and end the first
        found.available = False
        _say_unmeasured()
        yield found
        return
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    _ours.add(profiler)
    quiet = contextlib.ExitStack()
    try:
        profiler.__enter__()
    except RuntimeError:
        found.available = False
        yield found
        return
    try:
        quiet.enter_context(_warnings_off())
        yield found
    finally:
        try:
            quiet.close()
            profiler.__exit__(None, None, None)
            _read(profiler, found)
        finally:
            # a profiler is a reference cycle; if the collector frees its trace while a later one runs, Kineto crashes
            if profiler.profiler is not None:
                _ours.add(profiler.profiler)
                profiler.profiler.kineto_results = None
                profiler.profiler = None


@contextlib.contextmanager
def _warnings_off() -> Iterator[None]:
    """torch's log says of memory from before the profiler that its end is not seen: so it is meant, and it would be said in
    nearly every run.
    """
    try:
        home = Path(torch.__file__).parent / "lib"
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(next(home.glob("libc10.*")))), "FLAGS_caffe2_log_level")
    except (OSError, ValueError, StopIteration):
        yield
        return
    before = level.value
    level.value = max(before, _LOG_ERRORS)
    try:
        yield
    finally:
        level.value = before


_LOG_ERRORS = 2
_PROFILERS = {KINETO_PROFILE, torch.autograd.profiler.profile}
_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""Profilers that were made here, until the collector meets them."""


def _others() -> bool:
    """Whether there is a profiler of somebody else's: while it waits or warms up torch does not tell, and one that is stepped
    in this block would begin inside of ours.
    """
    kinds: dict[type, bool] = {}
    for known in gc.get_objects():
        kind = type(known)
        if kind not in kinds:
            kinds[kind] = not _PROFILERS.isdisjoint(kind.__mro__)
        if kinds[kind] and known not in _ours:
            return True
    return False


@cache
def _say_unmeasured() -> None:
    warnings.warn(
        "MemOpt: steps beside another profiler are not measured, because two would disturb each other and there is no native "
        "memory meter. Plans are made from what was observed, and are in force.",
        stacklevel=6,
    )


def _read(profiler: profile, found: AllocatorEvents) -> None:
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        found.available = False
        return
    marks = []
    allocations = []
    for event in results.events():
        name = event.name()
        if name == "[memory]":
            if event.device_type() == torch.autograd.DeviceType.CPU:
                nbytes = event.nbytes()  # type: ignore[attr-defined]
                allocations.append((event.start_ns(), nbytes))
        elif name.startswith(_MARK):
            marks.append((event.start_ns(), event.end_ns(), int(name[len(_MARK) :])))
    marks.sort()
    now = top = 0
    k = 0
    open_net = open_peak = 0

    def close(index: int) -> None:
        found.workspaces[index] = max(0, open_peak - max(open_net, 0))

    for at, nbytes in allocations:
        while k < len(marks) and marks[k][1] < at:
            close(marks[k][2])
            open_net = open_peak = 0
            k += 1
        now += nbytes
        top = max(top, now)
        if k < len(marks) and marks[k][0] <= at:
            open_net += nbytes
            open_peak = max(open_peak, open_net)
    if k < len(marks):
        close(marks[k][2])
    found.peak_nbytes = top
