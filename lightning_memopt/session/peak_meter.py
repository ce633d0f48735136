"""Measure the peak of one whole step by the allocator, by the definition of the budget."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_memopt.native import counter
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.resident import foreign_nbytes, resident_nbytes, resident_tensors
from lightning_memopt.torch_private import COMPILED_FRAME
from lightning_memopt.trace import AllocatorEvents, metered_cpu


def in_compiled_code() -> bool:
    """Whether a function of torch.compile's runs: when it ends, dynamo puts dispatch keys back as they were when it began."""
    frame = inspect.currentframe()
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == COMPILED_FRAME:
            return True
        frame = frame.f_back
    return False


class Measured(NamedTuple):
    """Of one step: its peak in bytes, and what was in memory when it began; None where that is not known."""

    peak_nbytes: int
    base_nbytes: int | None


class StepMeter:
    """CPU: by the native counter, all that is alive, and the `foreign_nbytes` beside. CUDA: `max_memory_reserved`.

    Without the counter: resident bytes at its start plus the highest running sum of allocator events. The profiler does not
    report the end of memory that it did not see being allocated: `gradients` of an unmetered step that `zero_grad` frees during
    this one (Lightning: between forward and backward) do not count as resident.
    """

    def __init__(
        self,
        device: torch.device,
        resident_nbytes: int,
        gradients: Iterable[torch.Tensor] = (),
        foreign_nbytes: int = 0,
    ) -> None:
        self.device = device
        self.resident_nbytes = resident_nbytes
        self.base_nbytes: int | None = None
        self._foreign_nbytes = foreign_nbytes
        self._gradients = [(weakref.ref(s), s.nbytes()) for s in (g.untyped_storage() for g in gradients)]
        self._stack = contextlib.ExitStack()
        self._events: AllocatorEvents | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        counts = counter()
        if counts is not None:
            self.base_nbytes = counts.live_nbytes + foreign_nbytes
        self._events = self._stack.enter_context(metered_cpu())

    def close(self) -> int | None:
        """The peak in bytes; None where another profiler was running."""
        self._stack.close()
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        if self._events is None or not self._events.available:
            return None
        if not self._events.profiled:
            return None if self.base_nbytes is None else self.base_nbytes + self._events.peak_nbytes
        freed = sum(nbytes for gradient, nbytes in self._gradients if gradient() is None)
        return self.resident_nbytes - freed + self._events.peak_nbytes


class Metering:
    """Which steps are measured, and by one meter at a time. By the native counter, all of them.

    torch puts a span around every `Optimizer.step`. One that began while a profiler measured ends in that profiler's memory:
    until then, no other one begins (`metered_cpu`).
    """

    def __init__(self) -> None:
        self._meter: StepMeter | None = None
        self._metered = self._spoiled = False
        self._spans: set[int] = set()
        self._foreign_nbytes: int | None = None

    @property
    def profiling(self) -> bool:
        """Whether the step is slowed by what measures it."""
        return self._meter is not None and self._meter.base_nbytes is None

    @property
    def possible(self) -> bool:
        """Whether a profiler may begin here."""
        return not self.profiling and not self._spans

    def begin(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any, device: torch.device, wanted: bool
    ) -> None:
        """A forward begins. `wanted`: it should be measured even where that takes time."""
        if self._meter is not None:
            return
        counts = counter() if device.type == "cpu" else None
        if counts is not None and not self._spoiled:
            if self._foreign_nbytes is None:
                self._foreign_nbytes = foreign_nbytes(resident_tensors(model, optimizers, ()))
            foreign = self._foreign_nbytes + foreign_nbytes(resident_tensors(_NO_MODEL, (), batch))
            self._meter = StepMeter(device, 0, foreign_nbytes=foreign)
        elif counts is None and wanted and self.possible:
            # the profiler reports the end of what it saw being allocated, so of gradients made in a metered step
            gradients = [] if self._metered else [p.grad for p in model.parameters() if p.grad is not None]
            resident = resident_nbytes(resident_tensors(model, optimizers, batch), device)
            self._meter = StepMeter(device, resident, gradients)

    def observing(self) -> None:
        """A forward of this step is observed: what the counter says of it says nothing about others."""
        if not self.profiling:
            meter, self._meter, self._spoiled = self._meter, None, True
            if meter is not None:
                meter.close()

    def close(self, observation: Observation | None = None) -> Measured | None:
        """What the step took, where it was measured. `observation`: of this step."""
        meter, self._meter, self._spoiled = self._meter, None, False
        profiled = meter is not None and meter.base_nbytes is None
        self._metered = profiled or (observation is not None and observation.metered)
        peak = meter.close() if meter is not None else None
        return None if meter is None or peak is None else Measured(peak, meter.base_nbytes)

    def span_begins(self, optimizer: torch.optim.Optimizer, observation: Observation | None = None) -> None:
        """An optimizer's step begins, or has begun; `observation`: which that is part of."""
        if self.profiling or (observation is not None and observation.metered):
            self._spans.add(id(optimizer))

    def span_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._spans.discard(id(optimizer))


_NO_MODEL = nn.Module()
