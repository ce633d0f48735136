"""Optimal checkpointing of a chain of stages: the public names, and `solve_chain`.

`solve_chain(chain, budget)` gives a table of the least extra seconds for every level of memory up to the budget.
`minimum_budget` gives the smallest budget, exact to the byte. `simulate` judges any schedule without using the solver's code.
The mathematics is in docs/formulation.md; the source is Beaumont et al., "Optimal checkpointing for heterogeneous chains"
(2019). `model` has the data; `bounds`, `cells` and `table` are the dynamic program; `by_numbers` solves a chain that a user
describes by numbers.

A new solver of the same problem belongs in this package; `simulate` can judge its schedules, too.
"""

from __future__ import annotations

from lightning_memopt.solvers.chain.bounds import minimum_budget, smallest_tree
from lightning_memopt.solvers.chain.model import Chain, Checkpoint, CheckpointTree, Hold, Option, Rebuild, Stage
from lightning_memopt.solvers.chain.simulate import operations, simulate, simulate_operations
from lightning_memopt.solvers.chain.table import ChainTable
from lightning_memopt.units import ceil_div

__all__ = [
    "Chain",
    "ChainTable",
    "Checkpoint",
    "Hold",
    "Option",
    "Rebuild",
    "CheckpointTree",
    "Stage",
    "minimum_budget",
    "operations",
    "simulate",
    "simulate_operations",
    "smallest_tree",
    "solve_chain",
]

_BUCKETS = 512


def solve_chain(chain: Chain, budget_nbytes: int, *, bucket_nbytes: int | None = None) -> ChainTable:
    """The table of least extra seconds for every level of memory up to `budget_nbytes` (everything counts, including x_0).

    The bucket is `bucket_nbytes`, or the budget over `_BUCKETS`, rounded up. Time grows as L^3 * columns / 6, memory as
    L^2 * columns * 4 bytes / 2 (8 for small tables). Raises ChainError for a negative budget or an empty bucket.
    """
    if bucket_nbytes is None:
        bucket_nbytes = max(1, ceil_div(budget_nbytes, _BUCKETS))
    return ChainTable(chain, budget_nbytes, bucket_nbytes)
