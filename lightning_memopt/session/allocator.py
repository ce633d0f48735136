"""Ask torch's allocator of CUDA memory how it rounds and splits: the environment says it only of scripts that set nothing."""

from __future__ import annotations

import torch

from lightning_memopt.plan.allocator import Settings, tell
from lightning_memopt.torch_private import allocator_snapshot


def read_settings(device: torch.device) -> None:
    """Let plans be priced by the settings that are in force now. Nothing is done for devices and allocators without such."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        tell(Settings.of_allocator(allocator_snapshot().get("allocator_settings", {})))
