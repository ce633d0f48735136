"""`MemOptDDPStrategy`: Lightning's DDP strategy, with each rank within a memory budget; registered as "memopt_ddp"."""

from __future__ import annotations

from lightning_memopt.config import with_option_texts
from lightning_memopt.integrations.lightnings import DDPStrategy
from lightning_memopt.strategies.options import MemOptOptions


@with_option_texts
class MemOptDDPStrategy(MemOptOptions, DDPStrategy):
    """Train on several devices, each within a memory budget, with `DistributedDataParallel`.

    All ranks agree on the plan, and a budget that is infeasible on one rank counts as infeasible on all of them.

    Args:
        config: all options of `MemOptConfig` in one object, instead of single ones. Raises ConfigError if both are given.
        fit_only: `trainer.fit` says whether the steps are within the budget (`strategy.fit`), and returns before it trains. For
            one device.
        kwargs: arguments of Lightning's `DDPStrategy`: `find_unused_parameters`, `gradient_as_bucket_view`, `static_graph`, ...
    """

    strategy_name = "memopt_ddp"
