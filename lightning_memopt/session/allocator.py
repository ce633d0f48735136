"""Ask torch's allocator of CUDA memory how it rounds and splits (the environment says it only of scripts that set nothing), and
what it has reserved when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memopt.plan.allocator import Beginning, Settings, tell, tell_beginning
from lightning_memopt.record.tensors import is_on
from lightning_memopt.session.resident import Named
from lightning_memopt.torch_private import allocator_snapshot


def _is_asked(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"


def read_settings(device: torch.device) -> None:
    """Let plans be priced by the settings that are in force now. Nothing is done for devices and allocators without such."""
    if _is_asked(device):
        tell(Settings.of_allocator(allocator_snapshot().get("allocator_settings", {})))


def read_beginning(device: torch.device, tensors: Iterable[Named]) -> None:
    """Let the next plans be priced from the segments that are there now. `tensors`: those of the step that is over."""
    tell_beginning(None)
    if not _is_asked(device):
        return
    strided = ((t, kind) for t, kind, _ in tensors if is_on(device, t.device) and t.layout is torch.strided)
    kinds = {t.untyped_storage().data_ptr(): kind for t, kind in strided}
    index = torch.cuda.current_device() if device.index is None else device.index
    tell_beginning(Beginning([s for s in allocator_snapshot()["segments"] if s["device"] == index], kinds))
