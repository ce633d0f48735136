"""`MemOptModelParallelStrategy`: Lightning's strategy for FSDP2 within a memory budget; registered as "memopt_fsdp2"."""

from __future__ import annotations

from lightning_memopt.config import with_option_texts
from lightning_memopt.strategies.lightning_private import ShardedStrategy
from lightning_memopt.strategies.options import MemOptOptions


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
