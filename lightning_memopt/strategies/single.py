"""`MemOptStrategy`: Lightning's single-device strategy within a memory budget; registered as "memopt"."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memopt.config import InBackward, MemOptConfig, OnExceed, changed, config_of
from lightning_memopt.solvers.planner import Objective
from lightning_memopt.strategies.mixin import MemOptMixin


class MemOptStrategy(MemOptMixin, SingleDeviceStrategy):
    """Train on one device within a budget of bytes.

    Args, besides the options of `MemOptConfig` (docs/options.md):
        device: the device; filled in from the Trainer when left out.
        config: all of those options in one object, instead of them. Raises ConfigError where both are given.
    """

    strategy_name = "memopt"

    def __init__(
        self,
        budget: int | float | str = "auto",
        recompute: bool = True,
        offload: str = "none",
        compress: str = "none",
        objective: Objective = "throughput",
        optimizer_in_backward: InBackward = "never",
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
        super().__init__(device="cpu" if device is None else device, **kwargs)
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
        self._chosen = device is not None
        # the connector fills these in; a plain SingleDeviceStrategy would train on one of several devices without a word
        self.parallel_devices: list[torch.device] | None = None
        self.cluster_environment: Any = None
        self.num_nodes = 1
        self._layer_sync: Any = None

    def _configure_launcher(self) -> None:
        devices = self.parallel_devices or []
        if len(devices) > 1 or self.num_nodes > 1:
            raise MisconfigurationException(
                f"MemOptStrategy trains on one device; the Trainer was given {len(devices)} and {self.num_nodes} nodes. "
                "Use devices=1."
            )
        if devices and not self._chosen:
            self._root_device = devices[0]
        super()._configure_launcher()


def register() -> None:
    """Make `Trainer(strategy="memopt")` work. Idempotent."""
    if "memopt" not in StrategyRegistry:
        StrategyRegistry.register("memopt", MemOptStrategy, description="Single device, within a memory budget")
