"""Move a model to a device that has no room for its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lightning_memopt import logs
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_on, on_host
from lightning_memopt.errors import OffloadError, UnsupportedError
from lightning_memopt.native.engine import loaded
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.parked_weights import parks_of, placed_in
from lightning_memopt.runtime.weight_units import weight_units
from lightning_memopt.units import format_nbytes

Model = TypeVar("Model", bound=nn.Module)


def to_device(model: Model, device: torch.device | str = "cuda", trained: bool = False) -> Model:
    """Move a model to a device, as `model.to(device)` does, without its frozen weights (`requires_grad=False`), and without
    those that are `trained`. These stay in page-locked memory of the host, or in a file where the device is the CPU. Those of
    each block are on the device only while the block runs, in training and in evaluation, and while they are updated.

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
        for path, own in weight_units(model, now, set(map(id, model.parameters())) if trained else ()).items():
            module, weights = model.get_submodule(path), list(own.values())
            if parked.has(path, module, weights):
                continue
            if path in parked.paths:
                parked.park_only(parked.paths - {path})  # a loop has moved the weights meanwhile (`model.cpu()`)
            with below_autograd():
                for weight in weights:
                    weight.data = weight.data.to(device)
            parked.add(path, module, weights)
    return model.to(device)


def make_room(model: nn.Module, device: torch.device, config: MemOptConfig, say: Callable[[str], None]) -> None:
    """A front is about to move a model to a device. If the budget, or the device, has no room for the weights that come, leave
    the frozen ones in the host's memory, as `to_device` does; all of them, if there is no room for the others, either. Say so.
    """
    if on_host(device) or disabled() or config.offload_to[0] not in ("auto", "host"):
        return
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if not is_on(device, t.device)}
    nbytes = sum(t.nbytes for t in tensors.values())
    budget, left = config.budget_nbytes(device), backend_of(device).left_nbytes()
    limit = min((most for most in (budget, left) if most is not None), default=nbytes)
    trained = sum(t.nbytes for t in tensors.values() if t.requires_grad) > limit
    allowed = set(tensors) if trained else ()
    if nbytes <= limit or not any(weight_units(model, now, allowed) for now in {t.device for t in tensors.values()}):
        return
    try:
        to_device(model, device, trained)
    except (UnsupportedError, OffloadError) as error:
        say(f"MemOpt: the weights ({format_nbytes(nbytes)}) have no room in {format_nbytes(limit)}, none are parked: {error}")
        return
    which = "they" if trained else "frozen ones"
    say(
        f"MemOpt: the weights ({format_nbytes(nbytes)}) have no room in {format_nbytes(limit)}: {which} stay in the host's "
        "memory, and are on the device only while their module runs"
    )


def let_go(model: nn.Module) -> None:
    """A front has moved a model elsewhere: weights that were parked need no memory of the tier any more."""
    parked = placed_in(model)
    if parked is not None:
        parked.let_go()
