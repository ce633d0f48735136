"""Every private name of transformers that this package uses. No other file uses such a name.

transformers may rename or remove these names in any release: `tests/cpu/transformers/test_private_api.py` lists the missing
ones. All of them are in transformers 4.57.1 (the first version that pyproject.toml admits) and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

FUNCTION = "_gradient_checkpointing_func"
"""The attribute in which a module keeps the function that checkpoints its layers."""


def checkpointing_function(module: nn.Module) -> Callable[..., Any] | None:
    """The function that checkpoints the layers of this module; None if checkpointing is off."""
    return vars(module).get(FUNCTION) if getattr(module, "gradient_checkpointing", False) is True else None


def exchange_checkpointing_function(module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace the function that checkpoints the layers of this module if it is `old`; otherwise the user has set another one.

    The function is called with a forward and its arguments. The flag `gradient_checkpointing` stays as it is, because models
    also use it otherwise: they do without a cache, and T5 asks for a gradient of its position bias.
    """
    if vars(module).get(FUNCTION) is old:
        setattr(module, FUNCTION, new)


def is_layer(module: nn.Module) -> bool:
    """Whether the module is one of the layers that are checkpointed (a `GradientCheckpointingLayer`), not a stack of them."""
    return hasattr(type(module), "gradient_checkpointing")
