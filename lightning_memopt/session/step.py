"""Measure the peak of one whole step by the allocator, by the definition of the budget."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from lightning_memopt.session.observation import Observation
from lightning_memopt.trace import AllocatorEvents, metered_cpu


def in_compiled_code() -> bool:
    """Whether a function of torch.compile's runs: when it ends, dynamo puts dispatch keys back as they were when it began."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


class StepMeter:
    """CPU: resident bytes at its start plus the highest running sum of allocator events. CUDA: `max_memory_reserved`.

    The profiler does not report the end of memory that it did not see being allocated: `gradients` of an unmetered step
    that `zero_grad` frees during this one (Lightning: between forward and backward) do not count as resident.
    """

    def __init__(self, device: torch.device, resident_nbytes: int, gradients: Iterable[torch.Tensor] = ()) -> None:
        self.device = device
        self.resident_nbytes = resident_nbytes
        self._gradients = [(weakref.ref(s), s.nbytes()) for s in (g.untyped_storage() for g in gradients)]
        self._stack = contextlib.ExitStack()
        self._events: AllocatorEvents | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._events = self._stack.enter_context(metered_cpu())

    def close(self) -> int | None:
        """The peak in bytes; None where another profiler was running."""
        self._stack.close()
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        if self._events is None or not self._events.available:
            return None
        freed = sum(nbytes for gradient, nbytes in self._gradients if gradient() is None)
        return self.resident_nbytes - freed + self._events.peak_nbytes


class Metering:
    """Which steps are measured, and by one meter at a time.

    torch puts a span around every `Optimizer.step`. One that began while something was metered ends in that profiler's memory:
    until then, no other meter begins (`metered_cpu`).
    """

    def __init__(self) -> None:
        self._meter: StepMeter | None = None
        self._metered = False
        self._spans: set[int] = set()

    @property
    def running(self) -> bool:
        return self._meter is not None

    @property
    def possible(self) -> bool:
        """Whether a meter may begin here."""
        return self._meter is None and not self._spans

    def begin(self, device: torch.device, resident_nbytes: int, parameters: Iterable[nn.Parameter]) -> None:
        # the profiler reports the end of what it saw being allocated, so of gradients made in a metered step
        gradients = [] if self._metered else [p.grad for p in parameters if p.grad is not None]
        self._meter = StepMeter(device, resident_nbytes, gradients)

    def close(self, observation: Observation | None = None) -> int | None:
        """The peak in bytes of the step, where it was metered. `observation`: of this step."""
        meter, self._meter = self._meter, None
        self._metered = meter is not None or (observation is not None and observation.metered)
        return meter.close() if meter is not None else None

    def span_begins(self, optimizer: torch.optim.Optimizer, observation: Observation | None = None) -> None:
        """An optimizer's step begins, or has begun; `observation`: which that is part of."""
        if self.running or (observation is not None and observation.metered):
            self._spans.add(id(optimizer))

    def span_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._spans.discard(id(optimizer))
