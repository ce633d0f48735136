"""The ranks that train one model together: they tell each other what they decided, and which of them has failed."""

from lightning_memopt.ranks.group import (
    buckets_nbytes,
    joins,
    rank_and_ranks,
    rank_in_all,
    ranks_of,
    rebuild_buckets,
    several_processes,
    size_here,
    wrapper_of,
)
from lightning_memopt.ranks.ranks import Ranks, of_collective

__all__ = [
    "Ranks",
    "buckets_nbytes",
    "joins",
    "of_collective",
    "rank_and_ranks",
    "rank_in_all",
    "ranks_of",
    "rebuild_buckets",
    "several_processes",
    "size_here",
    "wrapper_of",
]
