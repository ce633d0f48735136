"""Measure the peak of one whole step by the allocator, by the definition of the budget."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch

from lightning_memopt.trace import AllocatorEvents, metered_cpu


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
