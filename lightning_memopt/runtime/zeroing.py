"""Tell listeners of calls of `zero_grad`, of optimizers and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from lightning_memopt.record import Seams, parameters_of, uncompiled

Zeroed = Callable[[list[torch.Tensor], bool], None]
"""Called with parameters, and with whether their gradients are None now (otherwise they were set to zero in place)."""


def _telling(original: Callable[..., Any], parameters: Callable[[Any], list[torch.Tensor]]) -> Callable[..., Any]:
    @functools.wraps(original)
    @uncompiled
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for told in tuple(_seams.listeners):
            told(parameters(self), set_to_none)

    return zero_grad


_seams: Seams[Zeroed] = Seams(
    lambda: [
        (optim.Optimizer, "zero_grad", lambda original: _telling(original, parameters_of)),
        (nn.Module, "zero_grad", lambda original: _telling(original, lambda module: list(module.parameters()))),
    ]
)


def zeroed(told: Zeroed) -> Any:
    """Within, call `told` after gradients were zeroed."""
    return _seams.listening(told)
