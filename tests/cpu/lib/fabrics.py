"""Fabric on the CPU, with our strategy or with another one."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric

from lightning_memopt import MemOptFabricStrategy

QUIET: dict[str, Any] = dict(verbose=False, profile_steps=1, solver_seconds=0.3)


def fabric_of(strategy: Any, **options: Any) -> Fabric:
    return Fabric(strategy=strategy, accelerator="cpu", **({"devices": 1} | options))


def within(budget: Any = "min", **options: Any) -> MemOptFabricStrategy:
    return MemOptFabricStrategy(budget=budget, **(QUIET | options))
