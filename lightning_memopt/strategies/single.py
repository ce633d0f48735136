"""`MemOptStrategy`: within a memory budget on one device, or on each of several; registered as "memopt"."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memopt.config import with_option_texts
from lightning_memopt.strategies.ddp import MemOptDDPStrategy
from lightning_memopt.strategies.lightning_private import OneDeviceStrategy
from lightning_memopt.strategies.model_parallel import MemOptModelParallelStrategy
from lightning_memopt.strategies.options import MemOptOptions


@with_option_texts
class MemOptStrategy(MemOptOptions, OneDeviceStrategy):
    """Train within a memory budget. Where the Trainer has several devices, this becomes a `MemOptDDPStrategy`.

    Args:
        device: the training device; the Trainer's if left out.
        config: all of those options in one object, instead of single ones. Raises ConfigError if both are given.
        kwargs: as of Lightning's `SingleDeviceStrategy` or, where the Trainer has several devices, its `DDPStrategy`.
    """

    strategy_name = "memopt"
    parallel = MemOptDDPStrategy


def register() -> None:
    """Make `Trainer(strategy="memopt")`, `"memopt_ddp"` and `"memopt_fsdp2"` work. A second call does nothing."""
    for strategy, description in (
        (MemOptStrategy, "Within a memory budget, on one device or with DDP"),
        (MemOptDDPStrategy, "DDP, each device within a memory budget"),
        (MemOptModelParallelStrategy, "FSDP2, each process within a memory budget"),
    ):
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=description)
