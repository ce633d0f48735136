"""Measure with the allocator: the peak of a step, and the workspace of each op (its peak without its outputs).

CPU: the native counter (counted.py). Without it, the allocator events of torch's profiler (`profile_memory=True`), with marks
around the ops.
CUDA: the statistics of the caching allocator, and events on the stream around each op. Bytes are the requested ones. The
blocks, which torch counts as allocated, may be larger by up to 1 MiB each.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import Backend
from lightning_memopt.live_objects import live_objects
from lightning_memopt.native import Counter, Window, counter
from lightning_memopt.torch_private import KINETO_PROFILE, profiler_is_on, record_function
from lightning_memopt.trace.counted import Marks
from lightning_memopt.trace.requests import Requests

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler would write two lines to stderr per step
_MARK = "memopt#"


class OpMarks(Protocol):
    """Is told when each op begins and ends, to measure what the op allocates."""

    def begins(self, index: int, frees: bool = False) -> None:
        """The op `index` is about to run. `frees`: it is a hook that frees (gathered.py)."""

    def ends(self) -> None:
        """It has ended."""


class _ProfilerMarks:
    """Spans in the profile."""

    def begins(self, index: int, frees: bool = False) -> None:
        self._span = record_function(f"{_MARK}{index}")
        self._span.__enter__()

    def ends(self) -> None:
        self._span.__exit__(None, None, None)


@dataclass
class AllocatorEvents:
    """The measurements of a metered block; complete when the block has ended.

    available: whether anything was measured.
    profiled: whether torch's profiler measured, not the native counter.
    peak_nbytes: peak above the bytes at the start of the block.
    workspaces: index of an op -> peak bytes of the op minus the bytes that are left after it.
    marks: must be told of each op.
    """

    available: bool = True
    profiled: bool = False
    peak_nbytes: int = 0
    workspaces: dict[int, int] = field(default_factory=dict)
    marks: OpMarks = field(default_factory=_ProfilerMarks)


class TimedOps:
    """Seconds and bytes of each op on a device whose allocator keeps statistics. Seconds are measured between two events.

    The allocator's statistics are read after each op, and before it if its requests are recorded. This is not part of the
    measured time, because it takes longer than many ops.

    beyond_left_nbytes: peak of the last op minus the bytes that are left after it.
    """

    def __init__(self, backend: Backend) -> None:
        self.beyond_left_nbytes = 0
        self._backend = backend
        self._timed: list[_Timed] = []
        self._requests = Requests(backend)

    def begin(self, index: int) -> None:
        self._backend.reset_peaks()
        if self._requests.records:
            self._requests.begin(index, self._backend.statistics().turnover)
        idle = index > 0 and self._timed[index - 1].ended.query()
        timed = _Timed(self._backend.timing_event(), self._backend.timing_event(), idle)
        self._timed[index:] = [timed]  # replaces the events of an op that raised
        timed.began.record(self._backend.current_stream())
        timed.host_began = perf_counter()

    def end(self) -> None:
        timed = self._timed[-1]
        timed.host_seconds = perf_counter() - timed.host_began
        timed.ended.record(self._backend.current_stream())
        statistics = self._backend.statistics()
        if self._requests.records:
            self._requests.end(statistics.turnover)
        self.beyond_left_nbytes = max(0, statistics.peak_nbytes - statistics.nbytes)

    def seconds(self, count: int) -> list[float]:
        """Seconds of the first `count` ops. Waits for the device."""
        self._backend.synchronize()
        return [timed.seconds for timed in self._timed[:count]]

    def asked(self) -> dict[int, tuple[int, ...]]:
        """The requests of each op to the allocator (`Graph.asked`), where they are known."""
        return self._requests.of_ops(self._backend.statistics().turnover) if self._requests.records else {}

    def close(self) -> None:
        """Stop recording requests."""
        self._requests.close()


@dataclass
class _Timed:
    """An op between two events.

    idle: whether the device had finished the previous op when this one began. Then it reaches the first event at once, and
        the time between the events includes the host's time for the launch.
    """

    began: Any
    ended: Any
    idle: bool
    host_began: float = 0.0
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the device."""
        between = 1e-3 * self.began.elapsed_time(self.ended)
        return max(_LEAST_SECONDS, between - self.host_seconds) if self.idle else between


_LEAST_SECONDS = 1e-6
"""Minimum seconds of an op on a device. No kernel takes less."""


@contextlib.contextmanager
def metered_cpu() -> Iterator[AllocatorEvents]:
    """Measure the CPU allocator in this block.

    Without the native counter, torch's profiler measures. It cannot if another profiler runs or is about to (`available` is
    then False), and it does not see when memory from before the block is freed.
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
    """Measure with the native counter. `whole`: its window for the block; `ops`: its window for single ops."""
    live_nbytes = whole.reset()
    marks = Marks(ops)
    events = AllocatorEvents(marks=marks, workspaces=marks.workspaces)
    try:
        yield events
    finally:
        marks.close()
        events.peak_nbytes = whole.peak_nbytes - live_nbytes
        events.available = bool(counts.installed())
        whole.close()


@contextlib.contextmanager
def _profiled() -> Iterator[AllocatorEvents]:
    """Measure with torch's profiler.

    All spans that torch begins in this block (`record_function`: every `Optimizer.step`, every node of backward) must end
    before a later block of this kind begins. Otherwise their end writes to memory that was freed.
    """
    events = AllocatorEvents(profiled=True)
    if profiler_is_on() or _user_profiler():  # torch would start a second one silently, and end the first
        events.available = False
        _warn_unmeasured()
        yield events
        return
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    _own_profilers.add(profiler)
    quiet = contextlib.ExitStack()
    try:
        profiler.__enter__()
    except RuntimeError:
        events.available = False
        yield events
        return
    try:
        quiet.enter_context(_warnings_off())
        yield events
    finally:
        try:
            quiet.close()
            profiler.__exit__(None, None, None)
            _read(profiler, events)
        finally:
            # a profiler is a reference cycle; Kineto crashes if the collector frees its trace while a later profiler runs
            if profiler.profiler is not None:
                _own_profilers.add(profiler.profiler)
                profiler.profiler.kineto_results = None
                profiler.profiler = None


@contextlib.contextmanager
def _warnings_off() -> Iterator[None]:
    """Turn off torch's C++ warnings. In nearly every run torch would warn that it did not see when earlier memory was freed."""
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
_own_profilers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Profilers that this module created and that still exist."""


def _user_profiler() -> bool:
    """Whether there is a profiler that this module did not create.

    Torch does not report a profiler that waits or warms up. If the user steps it inside this block, it would begin to record
    inside of this module's profiler.
    """
    profilers = live_objects(lambda kind: not _PROFILERS.isdisjoint(kind.__mro__))
    return any(profiler not in _own_profilers for profiler in profilers)


@cache
def _warn_unmeasured() -> None:
    """Warn once per process."""
    warnings.warn(
        "MemOpt: steps in which another profiler runs are not measured, because two would disturb each other and there is no "
        "native memory meter. Plans are made from what was observed, and are in force.",
        stacklevel=6,
    )


def _read(profiler: profile, events: AllocatorEvents) -> None:
    """Compute the peak, and the workspace of each op, from the allocations and marks of the profiler."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        events.available = False
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
    live_nbytes = peak_nbytes = 0
    k = 0  # index of the mark with which allocations are compared
    open_net = open_peak = 0  # bytes since that mark began

    def close(index: int) -> None:
        events.workspaces[index] = max(0, open_peak - max(open_net, 0))

    for at, nbytes in allocations:
        while k < len(marks) and marks[k][1] < at:
            close(marks[k][2])
            open_net = open_peak = 0
            k += 1
        live_nbytes += nbytes
        peak_nbytes = max(peak_nbytes, live_nbytes)
        if k < len(marks) and marks[k][0] <= at:
            open_net += nbytes
            open_peak = max(open_peak, open_net)
    if k < len(marks):
        close(marks[k][2])
    events.peak_nbytes = peak_nbytes
