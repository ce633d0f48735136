"""Tensors that stay in memory longer than the plan says, because the forward deviates from the plan."""

from __future__ import annotations

from collections.abc import Iterable


class Guard:
    """The storage versions that stay in memory because of a deviation, by their ids.

    stand_ins: version -> tensors of the plan, other than its own, that it stands in for, because their ops did not run.
    needed: versions that stay longer than planned, because rebuilds need them that the plan does not know.
    until: (point of the graph, the versions that stay until backward has passed it).

    The native engine has `stand_ins` and `until`, so they stay the same objects.
    """

    __slots__ = ("_last_point", "needed", "stand_ins", "until")

    def __init__(self, last_point: int) -> None:
        self.stand_ins: dict[int, list[int]] = {}
        self.needed: set[int] = set()
        self._last_point = last_point
        self.until: list[tuple[int, set[int]]] = []

    def keep(self, ids: set[int], until: int | None = None) -> None:
        """Keep these versions until backward has passed the point `until` of the graph, or to the end if it is None."""
        self.until.append((self._last_point if until is None else until, ids))
        self.needed |= ids

    def pass_point(self, now: int) -> Iterable[int]:
        """Backward is at the point `now` of the graph. Returns the versions that are no longer needed."""
        self.until[:] = [(until, ids) for until, ids in self.until if until >= now]
        before, self.needed = self.needed, set().union(*(ids for _, ids in self.until))
        return before - self.needed
