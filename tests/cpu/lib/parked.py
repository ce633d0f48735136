"""Frozen weights that are parked without a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from lightning_memopt.logs import silent
from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.weight_memory import may_be_parked


@contextlib.contextmanager
def parked_of(model: nn.Module, say: Callable[[str], None] = silent) -> Iterator[ParkedWeights]:
    """The frozen weights of each child are parked, as a unit."""
    parked = ParkedWeights(say)
    try:
        for path, module in model.named_children():
            weights = [p for p in module.parameters() if may_be_parked(p)]
            if weights:
                parked.add(path, module, weights)
        yield parked
    finally:
        parked.close()
