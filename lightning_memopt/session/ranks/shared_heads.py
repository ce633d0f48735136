"""One choice for the loss heads of all ranks: all run in tiles, or none does.

At the end of an observed step each rank says what it knows of its head, and hears all others. A head is worth tiles if that of
any rank is; it stays whole if that of any rank must. Each rank has the sizes that it has proven: a tile runs no collective.

Where the ranks' steps were for different things (a batch of another shape came to one of them), each decides by itself. That
changes no numbers and blocks no rank: tiles run no collective, and each rank compares their bits itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Cost = tuple[int, float]
"""What the best plan costs: (0, seconds) where it keeps the budget, (1, bytes) where none does, (2, 0) where the step does not
fit into memory. Smaller is better.
"""


@dataclass(frozen=True)
class KnownHead:
    """What a rank knows of its loss head after an observed step; or all ranks together.

    step: what the step was for.
    why: why the head must stay whole; "" if it need not.
    needed: the step does not keep the budget as it is.
    again: another step compares larger tiles.
    ways: the number of ways in which the step may run in tiles.
    costs: what the best plan costs for the step as it is, and for each way in tiles; empty before all have run.
    """

    step: str
    why: str = ""
    needed: bool = False
    again: bool = False
    ways: int = 0
    costs: tuple[Cost, ...] = ()

    @property
    def best(self) -> int:
        """Which plan costs least: the first one of these."""
        return self.costs.index(min(self.costs))

    def fields(self) -> dict[str, Any]:
        """For a post."""
        return dict(vars(self))


def together(posts: Sequence[dict[str, Any]], rank: int, names: Sequence[int]) -> KnownHead | None:
    """What all ranks know, for this one; None where each decides by itself. `names`: the global numbers of ranks."""
    if not all(posts):
        return None
    known = [_of_fields(post) for post in posts]
    own = known[rank]
    needed = any(k.needed for k in known)
    cannot = next((i for i, k in enumerate(known) if k.why), None)
    if cannot is not None:
        return replace(own, needed=needed, why=own.why or f"on rank {names[cannot]}, {known[cannot].why}")
    if any(k.step != own.step for k in known):
        return None
    again = any(k.again for k in known)
    ways = min((k.ways for k in known if not k.again), default=0)
    costs = tuple(map(max, zip(*(k.costs for k in known), strict=False)))  # all wait for the slowest
    return replace(own, needed=needed, again=again, ways=ways, costs=costs)


def _of_fields(post: dict[str, Any]) -> KnownHead:
    costs = tuple((kept, cost) for kept, cost in post["costs"])
    return KnownHead(**post | {"costs": costs})
