"""`MemOptStrategy`: Lightning's single-device strategy within a memory budget; registered as "memopt"."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_memopt.config import EarlyUpdating, MemOptConfig, OnExceed, changed, config_of
from lightning_memopt.plan.model import Objective
from lightning_memopt.strategies.lightning_private import OneDeviceStrategy
from lightning_memopt.strategies.mixin import MemOptMixin


class MemOptStrategy(MemOptMixin, OneDeviceStrategy):
    """Train on one device within a memory budget.

    Args, besides the options of `MemOptConfig` (docs/options.md):
        device: the training device; the Trainer's if left out.
        config: all of those options in one object, instead of single ones. Raises ConfigError if both are given.
    """

    strategy_name = "memopt"

    def __init__(
        self,
        budget: int | float | str = "auto",
        recompute: bool = True,
        offload: str = "none",
        compress: str = "none",
        objective: Objective = "throughput",
        optimizer_in_backward: EarlyUpdating = "never",
        profile_steps: int = 3,
        solver_seconds: float = 30.0,
        headroom: int = 0,
        on_exceed: OnExceed = "replan",
        plan: str | os.PathLike[str] | None = None,
        verify: bool = True,
        verbose: bool = True,
        device: str | torch.device | None = None,
        config: MemOptConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device=device, **kwargs)
        options = dict(
            budget=budget,
            recompute=recompute,
            offload=offload,
            compress=compress,
            objective=objective,
            optimizer_in_backward=optimizer_in_backward,
            profile_steps=profile_steps,
            solver_seconds=solver_seconds,
            headroom=headroom,
            on_exceed=on_exceed,
            plan=plan,
            verify=verify,
            verbose=verbose,
        )
        self.memopt_config = config_of(config, options if config is None else changed(options))


def register() -> None:
    """Make `Trainer(strategy="memopt")` work. A second call does nothing."""
    if "memopt" not in StrategyRegistry:
        StrategyRegistry.register("memopt", MemOptStrategy, description="Single device, within a memory budget")
