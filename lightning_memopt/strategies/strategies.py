"""`MemOptStrategy` for one device, or each of several, and the strategies for DDP and FSDP2: each within a memory budget."""

from __future__ import annotations

from lightning_memopt.config import with_option_texts
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.lightnings import DDPStrategy
from lightning_memopt.integrations.to_device import let_go, make_room
from lightning_memopt.strategies.lightning_private import OneDeviceStrategy, ShardedStrategy
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


@with_option_texts
class MemOptModelParallelStrategy(MemOptOptions, ShardedStrategy):
    """Train a model that its `configure_model` shards by `fully_shard` (FSDP2), each process within a memory budget.

    Args:
        config: all options of `MemOptConfig` in one object, instead of single ones. Raises ConfigError if both are given.
        fit_only: for one device only.
        kwargs: arguments of `ModelParallelStrategy`. By default the data parallel size is the number of processes, and the
            tensor parallel size is 1. Weights that are split for tensor parallelism are refused (UnsupportedError).
    """

    strategy_name = "memopt_fsdp2"


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

    def model_to_device(self) -> None:
        model = self.model
        if model is not None and self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit":
            make_room(model, self.root_device, self.memopt_config, rank_zero_say)
        super().model_to_device()

    def teardown(self) -> None:
        model = self.model
        super().teardown()
        if model is not None:
            let_go(model)  # Lightning has moved it to the CPU
