"""On which device tensors are, and which device is the current one of a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

_CPU = torch.device("cpu")


def on_host(device: torch.device) -> bool:
    """Whether ops on this device run in the calling thread and in the host's memory."""
    return device.type == "cpu"


def same_type(device: torch.device, name: str) -> bool:
    """Whether the device is of the type with this name."""
    return device.type == name


def has_memory(device: torch.device) -> bool:
    """Whether tensors on this device have bytes. Tensors on "meta" do not."""
    return device.type != "meta"


def best_here() -> torch.device:
    """This machine's accelerator; the CPU if it has none."""
    return torch.accelerator.current_accelerator() or _CPU


def is_here(device: torch.device) -> bool:
    """Whether this machine has such a device."""
    return on_host(device) or bool(torch.get_device_module(device).is_available())


def is_on(device: torch.device, where: torch.device) -> bool:
    """Whether both are the same device: the same type and, if both have a number, the same number."""
    index: int | None = device.index
    other: int | None = where.index
    return where.type == device.type and (index is None or other is None or index == other)


def device_of_call(devices: Iterable[torch.device], kwargs: dict[str, Any]) -> torch.device:
    """The device of an op that reads tensors on `devices`: its argument `device`, else the first accelerator of these, else the
    CPU.
    """
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    return next((d for d in devices if not on_host(d)), _CPU)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within this context, `device` is the current one of this thread. In a new thread, device 0 is the current one, and it may
    belong to another process: using the current device would open a context on it.
    """
    index: int | None = device.index
    if on_host(device) or index is None:
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)


def indexed(device: torch.device) -> torch.device:
    """The device with a number. If it has none, it gets the number of this thread's current device."""
    index: int | None = device.index
    if on_host(device) or index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def generator_of(device: torch.device) -> torch.Generator | None:
    """The default generator of a device, from which ops draw if they get no generator argument; None if torch has none."""
    if on_host(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    return generators[index] if index < len(generators) else None


def generator_of_call(args: tuple, kwargs: dict[str, Any], devices: Iterable[torch.device]) -> torch.Generator | None:
    """The generator from which a random op draws if it reads tensors on `devices`; None if torch has none."""
    given = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
    return given or generator_of(device_of_call(devices, kwargs))
