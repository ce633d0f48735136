"""`MemOptStrategy`: within a memory budget on one device, or on each of several; registered as "memopt"."""

from __future__ import annotations

from lightning_memopt.config import with_option_texts
from lightning_memopt.strategies.ddp import MemOptDDPStrategy
from lightning_memopt.strategies.lightning_private import OneDeviceStrategy
from lightning_memopt.strategies.options import MemOptOptions


@with_option_texts
class MemOptStrategy(MemOptOptions, OneDeviceStrategy):
    """Train within a memory budget. If the Trainer has several devices, this becomes a `MemOptDDPStrategy`.

    Args:
        device: the training device; the Trainer's if left out.
        config: all options of `MemOptConfig` in one object, instead of single ones. Raises ConfigError if both are given.
        fit_only: `trainer.fit` says whether the steps are within the budget (`strategy.fit`), and returns before it trains. For
            one device.
        kwargs: arguments of Lightning's `SingleDeviceStrategy` or, if the Trainer has several devices, of its `DDPStrategy`.
    """

    strategy_name = "memopt"
    parallel = MemOptDDPStrategy
