"""`MemOptModelParallelStrategy`: Lightning's strategy for FSDP2 within a memory budget; registered as "memopt_fsdp2"."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memopt.config import EarlyUpdating, MemOptConfig, OnExceed, changed, config_of
from lightning_memopt.solvers.planner import Objective
from lightning_memopt.strategies.lightning_private import ShardedStrategy
from lightning_memopt.strategies.mixin import MemOptMixin


class MemOptModelParallelStrategy(MemOptMixin, ShardedStrategy):
    """Train a model that its `configure_model` shards by `fully_shard` (FSDP2), each process within a memory budget.

    Args, besides the options of `MemOptConfig` (docs/options.md):
        config: all of those options in one object, instead of single ones. Raises ConfigError if both are given.
        kwargs: those of `ModelParallelStrategy`. The data parallel size is the number of processes unless it is given, and the
            tensor parallel size 1: weights that are split for tensor parallelism are refused (UnsupportedError).
    """

    strategy_name = "memopt_fsdp2"

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
        config: MemOptConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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


def register_fsdp2() -> None:
    """Make `Trainer(strategy="memopt_fsdp2")` work. A second call does nothing."""
    if "memopt_fsdp2" not in StrategyRegistry:
        StrategyRegistry.register(
            "memopt_fsdp2", MemOptModelParallelStrategy, description="FSDP2, each process within a memory budget"
        )
