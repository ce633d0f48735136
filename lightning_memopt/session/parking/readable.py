"""Why a run can park no gradients and no frozen weights. They stay readable: their storages get the tier's own memory."""

from __future__ import annotations

from lightning_memopt.device.places import on_host
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.session.parking.offloading import Offloading


def obstacle(offloading: Offloading, alone: bool) -> Reason | None:
    """The first reason; None where there is none. `alone`: no other process trains the model."""
    if on_host(offloading.device) != (offloading.tier == "disk"):
        return Reason("the device cannot read a file", "Set offload='host'")
    if not alone:
        return Reason("several processes train, and plans of ranks do not park them yet", "Shard them with FSDP2")
    if loaded() is None:
        return Reason("the native engine is not there", "Install a C++ compiler")
    return None
