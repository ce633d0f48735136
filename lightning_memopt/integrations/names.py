"""How a strategy shows itself in the messages of Lightning, which is installed under two names."""

from __future__ import annotations

from typing import Any

_OTHERS = {
    "lightning.pytorch": ("pytorch_lightning", "lightning_memopt.pytorch_lightning"),
    "lightning.fabric": ("lightning_fabric", "lightning_memopt.pytorch_lightning"),
    "pytorch_lightning": ("lightning.pytorch", "lightning_memopt"),
    "lightning_fabric": ("lightning.fabric", "lightning_memopt"),
}
"""Package of Lightning -> the same package under its other name, and where the same class for that one is."""


def shown(strategy: Any) -> str:
    """Class of the strategy, the Lightning that it is for, and the import for the other one. A Trainer that refuses the
    strategy because it is of the other Lightning prints this.
    """
    name = type(strategy).__name__
    for base in type(strategy).__mro__:
        for package, (other, home) in _OTHERS.items():
            if base.__module__.startswith(f"{package}."):
                return f"{name} for {package} (for {other}: from {home} import {name})"
    return name
