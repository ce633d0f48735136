"""The options of `MemOptConfig` as arguments of a strategy, for every strategy of this package."""

from __future__ import annotations

import os
from typing import Any

from lightning_memopt.config import EarlyUpdating, MemOptConfig, OnExceed, changed, config_of
from lightning_memopt.plan.model import Objective
from lightning_memopt.strategies.mixin import MemOptMixin


class MemOptOptions(MemOptMixin):
    """`MemOptMixin` with a constructor: the options, and the arguments of Lightning's strategy that follows in the bases."""

    def __init__(
        self,
        budget: int | float | str = "auto",
        recompute: bool = True,
        offload: str = "none",
        host_budget: int | float | str | None = None,
        disk_budget: int | float | str | None = None,
        compress: str = "none",
        objective: Objective = "throughput",
        optimizer_in_backward: EarlyUpdating = "never",
        profile_steps: int = 3,
        solver_seconds: float = 30.0,
        headroom: int = 0,
        on_exceed: OnExceed = "replan",
        plan: str | os.PathLike[str] | None = None,
        pool: str | None = None,
        tile: str = "exact",
        compile: bool = False,
        verify: bool = True,
        report: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        max_slowdown: float = 3.0,
        config: MemOptConfig | None = None,
        fit_only: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        options = dict(
            budget=budget,
            max_slowdown=max_slowdown,
            recompute=recompute,
            offload=offload,
            host_budget=host_budget,
            disk_budget=disk_budget,
            compress=compress,
            objective=objective,
            optimizer_in_backward=optimizer_in_backward,
            profile_steps=profile_steps,
            solver_seconds=solver_seconds,
            headroom=headroom,
            on_exceed=on_exceed,
            plan=plan,
            pool=pool,
            tile=tile,
            compile=compile,
            verify=verify,
            report=report,
            verbose=verbose,
        )
        self.fit_only = fit_only
        self.memopt_config = config_of(config, options if config is None else changed(options))
