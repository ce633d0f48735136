"""The backend of a device. Input: a `torch.device`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from lightning_memopt.device.accelerator import Accelerator
from lightning_memopt.device.backend import Backend
from lightning_memopt.device.cpu import Cpu
from lightning_memopt.device.cuda import Cuda

_OF_TYPE: dict[str, type[Backend]] = {"cpu": Cpu, "meta": Cpu, "cuda": Cuda}


@cache
def backend_of(device: torch.device) -> Backend:
    """The backend of a device."""
    return _OF_TYPE.get(device.type, Accelerator)(device)


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread now queues work for the device; None on the CPU."""
    return backend_of(device).current_stream()


def generators_kept() -> Callable[[], None]:
    """Read the states of the accelerators' default generators. Returns a function that sets them back."""
    module = _initialized()
    for names in (("get_rng_state_all", "set_rng_state_all"), ("get_rng_state", "set_rng_state")):
        if all(hasattr(module, name) for name in names):
            get, put = (getattr(module, name) for name in names)
            return partial(put, get())
    return lambda: None


def empty_caches() -> None:
    """Give all cached memory that this process does not use back to its accelerators."""
    module = _initialized()
    if module is not None:
        module.empty_cache()


def _initialized() -> Any:
    """The torch module of the accelerator that this process has used; None if it has used none."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return module if getattr(module, "is_initialized", lambda: module is not None)() else None
