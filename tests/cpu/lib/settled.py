"""What is left of collectives when gloo's threads have settled."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from lightning_memopt.native import counter
from lightning_memopt.record.settling import can_settle, find_threads, settle


def settles() -> dict[str, Any]:
    """Collectives one after the other: after how many of them bytes were left."""
    counts, world = counter(), distributed.get_world_size()
    window = counts.window() if counts is not None else None
    find_threads()
    left = 0
    for _ in range(200 if window is not None else 0):
        part, whole = torch.ones(1 << 14), torch.ones(world << 14)
        before = window.reset()  # type: ignore[union-attr]
        distributed.reduce_scatter_tensor(part, whole)
        distributed.all_gather_into_tensor(whole, part)
        settle()
        left += window.reset() > before  # type: ignore[union-attr]
    if window is not None:
        window.close()
    return {"can": can_settle(), "left": left}
