"""Move a model to a device that has no room for its frozen weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from lightning_memopt import logs
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.native.engine import loaded
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.frozen_units import frozen_units
from lightning_memopt.runtime.parked_weights import parks_of

Model = TypeVar("Model", bound=nn.Module)


def to_device(model: Model, device: torch.device | str = "cuda") -> Model:
    """Move a model to a device, as `model.to(device)` does, without its frozen weights (`requires_grad=False`). These stay in
    page-locked memory of the host, or in a file where the device is the CPU. Those of each block are on the device only while
    the block runs, in training and in evaluation.

    For models that are larger than the device. All code sees the weights on the device, and reads the same bits. Then train
    under a budget with `offload="host"` (a file: `"disk"`): the plan says how many of the weights stay on the device.

    Returns the model. Raises UnsupportedError where there is no C++ compiler, and OffloadError where the host has no room.
    """
    device = torch.empty(0, device=device).device  # with its index
    install_native(logs.say)
    if loaded() is None:
        raise UnsupportedError("Weights are parked by the native engine, which is not there. Install a C++ compiler.")
    parked = parks_of(model)
    for now in {p.device for p in model.parameters()}:
        for path, own in frozen_units(model, now).items():
            if path in parked.paths:
                continue
            with below_autograd():
                for weight in own.values():
                    weight.data = weight.data.to(device)
            parked.put(path, model.get_submodule(path), list(own.values()))
    return model.to(device)
