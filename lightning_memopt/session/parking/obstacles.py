"""Why a run parks no gradients and no weights, or nothing that an optimizer reads."""

from __future__ import annotations

from torch import optim

from lightning_memopt.device.places import on_host
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime.early_updates import ALLOWED, Reason, of_step
from lightning_memopt.session.parking.offloading import Offloading

_CHUNKED = (*ALLOWED, optim.Adamax, optim.RMSprop, optim.ASGD, optim.Rprop, optim.Adadelta)
"""Optimizers of torch that update each parameter by itself, and write to its own state alone."""
_RANKS = Reason("several processes train, and plans of ranks park none yet", "Shard with FSDP2 or ZeRO")


def obstacle(offloading: Offloading, alone: bool) -> Reason | None:
    """The first reason against gradients and weights, which stay readable: their storages get the tier's own memory.
    `alone`: no other process trains the model.
    """
    if on_host(offloading.device) != (offloading.tier == "disk"):
        return Reason("the device cannot read a file", "Set offload='host'")
    if not alone:
        return _RANKS
    if loaded() is None:
        return Reason("the native engine is not there", "Install a C++ compiler")
    return None


def obstacle_of(optimizer: optim.Optimizer, compiled: bool, alone: bool) -> Reason | None:
    """The first reason against state and gradients that this optimizer reads. `compiled`: its step is."""
    for reason in of_step(optimizer, _CHUNKED):
        return reason
    if any(group.get("capturable") for group in optimizer.param_groups):
        return Reason("a capturable optimizer has its state at fixed addresses", "Set capturable=False")
    if compiled:
        return Reason("the optimizer's step is compiled", "Step without torch.compile")
    return None if alone else _RANKS
