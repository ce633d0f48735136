"""Measure the peak of a whole step at the allocator, as the budget defines it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_memopt.device.backends import backend_of
from lightning_memopt.native import Window, counter, counter_of
from lightning_memopt.ranks import buckets_nbytes
from lightning_memopt.session.measure.between import Between, spoil_between
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.resident import batch_tensors, foreign_nbytes, resident_nbytes, resident_tensors
from lightning_memopt.torch_private import COMPILED_FRAME, gradient_of
from lightning_memopt.trace import AllocatorEvents, metered_cpu


def in_compiled_code() -> bool:
    """Whether a function of torch.compile is running. When it ends, dynamo restores the dispatch keys from its begin."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == COMPILED_FRAME:
            return True
        frame = frame.f_back
    return False


class Measured(NamedTuple):
    """A measured step.

    peak_nbytes: its peak.
    base_nbytes: bytes in memory when it began; None where that is not known.
    """

    peak_nbytes: int
    base_nbytes: int | None


class StepMeter:
    """Measures the peak of one step. On CUDA: `max_memory_reserved`. On the CPU: all live bytes by the native counter, and the
    foreign ones; without the counter, the resident bytes plus the highest running sum of allocator events.

    resident_nbytes: resident bytes when the step begins.
    gradients: gradients of an unmetered step. The profiler does not report the end of memory whose allocation it did not see.
        So those that `zero_grad` frees during this step (Lightning: between forward and backward) are subtracted.
    foreign_nbytes: bytes that torch's CPU allocator did not allocate.
    base_nbytes: bytes in memory when the step began; None without the counter.
    """

    def __init__(
        self,
        device: torch.device,
        resident_nbytes: int,
        gradients: Sequence[torch.Tensor] = (),
        foreign_nbytes: int = 0,
    ) -> None:
        self.device = device
        self.resident_nbytes = resident_nbytes
        self.base_nbytes: int | None = None
        self._foreign_nbytes = foreign_nbytes
        storages = [g.untyped_storage() for g in gradients] if gradients else ()
        self._gradients = [(weakref.ref(s), s.nbytes()) for s in storages] if storages else []
        self._metered: contextlib.AbstractContextManager[AllocatorEvents] | None = None
        self._events: AllocatorEvents | None = None
        self._window: Window | None = None
        self._backend = backend_of(device)
        if self._backend.keeps_statistics:
            self._backend.synchronize()
            self._backend.empty_cache()
            self._backend.reset_peaks()
            return
        counts = counter()
        self._window = None if counts is None else counts.window()
        if self._window is not None:
            self.base_nbytes = self._window.peak_nbytes + foreign_nbytes
        else:
            self._metered = metered_cpu()
            self._events = self._metered.__enter__()

    def close(self) -> int | None:
        """The peak in bytes; None where another profiler was running."""
        window, self._window = self._window, None
        if window is not None:
            peak_nbytes = window.peak_nbytes + self._foreign_nbytes
            window.close()
            return None if counter() is None else peak_nbytes
        if self._metered is not None:
            self._metered.__exit__(None, None, None)
        if self._backend.keeps_statistics:
            return self._backend.peak_nbytes()
        if self._events is None or not self._events.available:
            return None
        freed = sum(nbytes for gradient, nbytes in self._gradients if gradient() is None)
        return self.resident_nbytes - freed + self._events.peak_nbytes


class Metering:
    """Decides which steps are measured, with one meter at a time. The native counter measures all of them.

    between: measures what is in memory between them.

    torch puts a span around every `Optimizer.step`. A span that began while a profiler was running ends in the memory of that
    profiler. So no other profiler begins before that (`metered_cpu`).
    """

    def __init__(self) -> None:
        _meterings.add(self)
        self.between = Between()
        self._meter: StepMeter | None = None
        self._reserved_nbytes: int | None = None
        self._metered = self._spoiled = False
        self._spans: set[int] = set()
        self._foreign_nbytes: int | None = None

    @property
    def profiling(self) -> bool:
        """Whether a profiler, which slows the step, measures it."""
        return self._meter is not None and self._meter.base_nbytes is None

    @property
    def possible(self) -> bool:
        """Whether a profiler may begin now."""
        return not self.profiling and not self._spans

    def begin(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any, device: torch.device, wanted: bool
    ) -> None:
        """A forward begins. `wanted`: its step is measured even where that takes time."""
        if self._meter is not None:
            return
        self._step_begins(device)
        counts = counter_of(device)
        if counts is not None and not self._spoiled:
            if self._foreign_nbytes is None:
                self._foreign_nbytes = foreign_nbytes(resident_tensors(model, optimizers, ()), counts)
            foreign = self._foreign_nbytes + foreign_nbytes(batch_tensors(batch), counts)
            self._meter = StepMeter(device, 0, foreign_nbytes=foreign)
        elif counts is None and wanted and self.possible:
            # the profiler reports the end of gradients that it saw being allocated: those of a metered step
            gradients = [] if self._metered else [g for p in model.parameters() if (g := gradient_of(p)) is not None]
            resident = resident_nbytes(resident_tensors(model, optimizers, batch), device) + buckets_nbytes(model)
            self._meter = StepMeter(device, resident, gradients)

    def _step_begins(self, device: torch.device) -> None:
        self.between.ends(self._foreign_nbytes or 0)
        before, self._reserved_nbytes = self._reserved_nbytes, None
        if before is not None:
            now = backend_of(device).peak_nbytes()
            if now > before:  # beyond what the step took that was measured last
                self.between.read(now)

    def observing(self, device: torch.device) -> None:
        """A forward of this step is observed: other steps have other peaks."""
        self._step_begins(device)
        self.spoil()

    def evaluating(self, device: torch.device) -> None:
        """Evaluation begins. It is not part of the step, which may go on after it (accumulation)."""
        self.close()
        self.between.begins(device)

    def begins_later(self) -> None:
        """The step has not begun yet: autograd has let go of its only forward so far. That counts as between two steps."""
        if self._meter is not None and self._meter.base_nbytes is not None and (measured := self.close()) is not None:
            self.between.read(measured.peak_nbytes)

    def spoil(self) -> None:
        """Other code has allocated memory during the step: its measurement does not count."""
        if not self.profiling:
            meter, self._meter, self._spoiled = self._meter, None, True
            if meter is not None:
                meter.close()

    def close(self, observation: Observation | None = None) -> Measured | None:
        """The measurement of the step; None where it was not measured. `observation`: that of this step."""
        meter, self._meter, self._spoiled = self._meter, None, False
        profiled = meter is not None and meter.base_nbytes is None
        self._metered = profiled or (observation is not None and observation.metered)
        peak = meter.close() if meter is not None else None
        self._reserved_nbytes = peak if meter is not None and backend_of(meter.device).keeps_statistics else None
        return None if meter is None or peak is None else Measured(peak, meter.base_nbytes)

    def end(self) -> None:
        """The run is over."""
        self.close()
        self.between.close()

    def span_begins(self, optimizer: torch.optim.Optimizer, observation: Observation | None = None) -> None:
        """An optimizer's step begins, or has begun. `observation`: that of the whole step."""
        meter = self._meter
        profiles = meter is not None and meter.base_nbytes is None
        if profiles or (observation is not None and observation.metered):
            self._spans.add(id(optimizer))

    def span_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._spans.discard(id(optimizer))


_meterings: weakref.WeakSet[Metering] = weakref.WeakSet()


def spoil_open_meters() -> None:
    """A plan is being made: the memory that this takes does not belong to any step, even if one of another session has begun (a
    GAN).
    """
    spoil_between()
    for metering in list(_meterings):
        if metering._meter is not None:
            metering.spoil()
