"""The ranks that train one model together: they tell each other what they decided, and which of them has failed."""

from lightning_memopt.ranks.group import buckets_nbytes, joins, ranks_of, rebuild_buckets, several_processes, wrapper_of
from lightning_memopt.ranks.ranks import Ranks, of_collective

__all__ = [
    "Ranks",
    "buckets_nbytes",
    "joins",
    "of_collective",
    "ranks_of",
    "rebuild_buckets",
    "several_processes",
    "wrapper_of",
]
