"""What a tracer has seen so far of a tensor, and of what autograd saved: a graph's are made of them when the step is over."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from lightning_memopt.graph.model import Kind
from lightning_memopt.torch_private import storage_use_count


@dataclass(slots=True)
class SeenTensor:
    """One version of a storage. `freed_at`: None while it is there."""

    name: str
    nbytes: int
    kind: Kind
    storage: int
    born_at: int
    freed_at: int | None = None
    dtype: str = ""
    size: tuple[int, ...] = ()


@dataclass(slots=True)
class SeenSave:
    """`line`: of the user's code. `released_at`: None until autograd lets it go."""

    tensor: int
    op: int
    line: str
    unpacked_at: list[int] = field(default_factory=list)
    released_at: int | None = None


def never_asked(saves: Iterable[SeenSave], end: int, written: Collection[int]) -> dict[int, int]:
    """Tensor -> the last point at which autograd holds it, for what it saves and never asks for (a head without a loss).

    No plan says anything about those, so they stay. `written`: tensors that were written over.
    """
    saves = list(saves)
    asked = {save.tensor for save in saves if save.unpacked_at}
    kept: dict[int, int] = {}
    for save in saves:
        if save.tensor not in asked and save.tensor not in written:
            kept[save.tensor] = max(kept.get(save.tensor, -1), end if save.released_at is None else save.released_at)
    return kept


def _own_count() -> int:
    t = torch.empty(1)
    cdata = t.untyped_storage()._cdata
    return storage_use_count(cdata) - 1


OWN_COUNT = _own_count()
"""What a storage whose Python object was once made counts by itself; it differs between versions of torch."""
