"""One choice for the loss heads of all ranks: all run in tiles of the same sizes, or none does.

At the end of an observed step each rank says what it knows of its head, and hears all others. A head is worth tiles if that of
any rank is; it stays whole if that of any rank must. Sizes are those that gave equal bits on every rank. Where batches have
other numbers of tokens, sizes mean other things, and each rank has its own.

Where the ranks' steps were for different things (a batch of another shape came to one of them), each decides by itself. That
changes no numbers and blocks no rank: tiles run no collective, and each rank compares their bits itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Cost = tuple[int, float]
"""What the best plan costs: (0, seconds) where it keeps the budget, else (1, bytes). Smaller is better."""


@dataclass(frozen=True)
class Known:
    """What a rank knows of its loss head after an observed step; or all ranks together.

    step: what the step was for.
    why: why the head must stay whole; "" if it need not.
    needed: the step does not keep the budget as it is.
    head: what the head is: its module, and the numbers of classes and tokens.
    rows, columns: the sizes of tiles that gave the bits of the whole ops, in the order in which they were tried.
    ops: names of the ops that were compared.
    whole, tiled: what a plan costs that leaves the head whole, and one in tiles.
    """

    step: str
    why: str = ""
    needed: bool = False
    head: tuple[Any, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    whole: Cost = (0, 0.0)
    tiled: Cost = (0, 0.0)

    @property
    def pays(self) -> bool:
        """Whether tiles are worth it."""
        return self.tiled < self.whole

    def fields(self) -> dict[str, Any]:
        """For a post."""
        return dict(vars(self))


def together(posts: Sequence[dict[str, Any]], rank: int, names: Sequence[int]) -> Known | None:
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
    whole, tiled = max(k.whole for k in known), max(k.tiled for k in known)  # all wait for the slowest
    if any(k.head != own.head for k in known):
        return replace(own, needed=needed, whole=whole, tiled=tiled)

    def common(of_each: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(value for value in of_each[rank] if all(value in values for values in of_each))

    rows, columns, ops = (common([getattr(k, name) for k in known]) for name in ("rows", "columns", "ops"))
    return replace(own, needed=needed, rows=rows, columns=columns, ops=ops, whole=whole, tiled=tiled)


def _of_fields(post: dict[str, Any]) -> Known:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in post.items()}
    return Known(**values)
