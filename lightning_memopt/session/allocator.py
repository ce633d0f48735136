"""Ask torch's allocator of CUDA memory how it rounds and splits (the environment says it only of scripts that set nothing), and
what it has reserved when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_on
from lightning_memopt.plan.allocator import Beginning, Settings, tell, tell_beginning
from lightning_memopt.session.resident import Named


def read_settings(device: torch.device) -> None:
    """Let plans be priced by the settings that are in force now. Nothing is done for devices and allocators without such."""
    said = backend_of(device).allocator_settings()
    if said is not None:
        tell(Settings.of_allocator(said))


def read_beginning(device: torch.device, tensors: Iterable[Named]) -> None:
    """Let the next plans be priced from the segments that are there now. `tensors`: those of the step that is over."""
    tell_beginning(None)
    segments = backend_of(device).segments()
    if segments is None:
        return
    strided = ((t, kind) for t, kind, _ in tensors if is_on(device, t.device) and t.layout is torch.strided)
    tell_beginning(Beginning(segments, {t.untyped_storage().data_ptr(): kind for t, kind in strided}))
