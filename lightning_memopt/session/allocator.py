"""Ask torch's allocator of CUDA memory how it rounds and splits: the environment says it only of scripts that set nothing."""

from __future__ import annotations

import torch

from lightning_memopt.device.backends import backend_of
from lightning_memopt.plan.allocator import Settings, tell


def read_settings(device: torch.device) -> None:
    """Let plans be priced by the settings that are in force now. Nothing is done for devices and allocators without such."""
    said = backend_of(device).allocator_settings()
    if said is not None:
        tell(Settings.of_allocator(said))
