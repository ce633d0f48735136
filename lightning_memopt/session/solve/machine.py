"""Ask torch what a plan must know of this machine: how its allocator of CUDA memory rounds and splits (the environment says it
only of scripts that set nothing), and what it has reserved when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_on
from lightning_memopt.plan import Machine
from lightning_memopt.plan.allocator import Beginning, Settings
from lightning_memopt.session.observe.resident import Named


def machine_of(device: torch.device, tensors: Iterable[Named] | None = None, update_seconds: float = 0.0) -> Machine:
    """The machine as it is now. `tensors`: those of the step that is over, by which blocks of the allocator are known; None: a
    step runs, in which what is reserved says little about the steps that come. `update_seconds`: see `Machine`.
    """
    backend = backend_of(device)
    said = backend.allocator_settings()
    allocator = Settings.from_environment() if said is None else Settings.of_allocator(said)
    segments = None if tensors is None else backend.segments()
    if tensors is None or segments is None:
        return Machine(allocator=allocator, update_seconds=update_seconds)
    strided = ((t, kind) for t, kind, _ in tensors if is_on(device, t.device) and t.layout is torch.strided)
    kinds = {t.untyped_storage().data_ptr(): kind for t, kind in strided}
    return Machine(allocator=allocator, beginning=Beginning(segments, kinds), update_seconds=update_seconds)
