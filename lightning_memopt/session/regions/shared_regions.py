"""One choice for the compiled regions of all ranks: the first rank chooses, and all compile the same plans.

At the end of an observed step each rank shows what it saw of its regions, and hears all others. Where code was compiled on any
of them, all observe again. Where all have the same regions, the first rank chooses for the rank with the least room. It sends
lives, not the place of a plan among its options: solvers are limited by time, so another rank may have other options.

A region's key has its ops and sizes. A dynamic region's sizes are symbols in it, so ranks with batches of other lengths share
such a region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memopt.compiled import Halves
from lightning_memopt.plan import Life
from lightning_memopt.session.regions.region_choice import Eager, Option

DIFFER = (
    "the compiled regions of the ranks differ (batches of other shapes, other graph breaks, or other options of MemOpt). Give "
    "all ranks batches of the same shapes"
)
APART = "ranks that train together choose plans of compiled regions only while all of them make their first plan"


@dataclass(frozen=True)
class Shown:
    """What a rank saw of the compiled regions in an observed step; or all ranks together.

    compiled: whether code was compiled in it.
    discarded: how many steps like it were discarded because code was compiled in them.
    keys: of its regions, in an order that all ranks share.
    peak_nbytes: its peak; 0 where it is discarded.
    least_nbytes: its peak with the smallest plan of the eager code around the regions.
    limit_nbytes: the most that it may take; None where the smallest plan is wanted.
    eager: plans of the eager code around the regions, where the step takes more than the limit.
    flop_seconds: the time that a FLOP of the regions takes.
    alike: whether all ranks that this was put together of have the same regions.
    """

    compiled: bool
    discarded: int
    keys: tuple[str, ...] = ()
    peak_nbytes: int = 0
    least_nbytes: int = 0
    limit_nbytes: int | None = None
    eager: tuple[Eager, ...] = ()
    flop_seconds: float = 0.0
    alike: bool = True

    @property
    def too_large(self) -> bool:
        """Whether the step is to take less."""
        return self.limit_nbytes is None or self.peak_nbytes > self.limit_nbytes

    def fields(self) -> dict[str, Any]:
        """For a post."""
        return {name: value for name, value in vars(self).items() if name != "alike"}


def together(posts: Sequence[dict[str, Any]]) -> Shown | None:
    """What all ranks show, as if the first one had the least room of all; None where a rank has no step to show. Where they are
    not alike: the step of a rank whose step is too large, if there is one.
    """
    if not all(posts):
        return None
    shown = [
        Shown(**(post | {"keys": tuple(post["keys"]), "eager": tuple(Eager(*fields) for fields in post["eager"])}))
        for post in posts
    ]
    first = shown[0]
    compiled, discarded = any(s.compiled for s in shown), min(s.discarded for s in shown)
    smallest = {s.limit_nbytes is None for s in shown}
    if any(s.keys != first.keys for s in shown) or len(smallest) > 1:
        shows = next((s for s in shown if s.too_large), first)
        return replace(shows, compiled=compiled, discarded=discarded, alike=False)
    limit = first.limit_nbytes or 0
    peak = limit + max(s.peak_nbytes - (s.limit_nbytes or 0) for s in shown)
    least = limit + max(s.least_nbytes - (s.limit_nbytes or 0) for s in shown)
    return replace(first, compiled=compiled, discarded=discarded, peak_nbytes=peak, least_nbytes=least)


def post_of(options: Sequence[Option | None] | None) -> dict[str, Any]:
    """The options of all regions, in the order of their keys, for a post."""
    if options is None:
        return {"options": None}
    return {"options": [None if option is None else fields_of_option(option) for option in options]}


def options_of(post: dict[str, Any]) -> list[Option | None] | None:
    """The options of a post."""
    fields_of_all = post["options"]
    return None if fields_of_all is None else [None if fields is None else option_of_fields(fields) for fields in fields_of_all]


def fields_of_option(option: Option) -> dict[str, Any]:
    """An option as JSON has it. Regions park nothing, so lives have no form."""
    return option._asdict() | {
        "lives": [(life.tensor, life.born_at, life.freed_at, life.how) for life in option.lives],
        "halves": vars(option.halves),
    }


def option_of_fields(fields: dict[str, Any]) -> Option:
    """The option that `fields_of_option` gave. Raises TypeError, KeyError or ValueError for anything else."""
    lives = tuple(Life(tensor=t, born_at=born, freed_at=freed, how=how) for t, born, freed, how in fields["lives"])
    return Option(**(fields | {"lives": lives, "halves": Halves(**fields["halves"])}))
