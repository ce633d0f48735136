"""Tensors that stay longer than the plan says, because the forward deviates from it."""

from __future__ import annotations

from collections.abc import Iterable


class Guard:
    """Which storage versions a deviation keeps in memory, by their ids.

    stands: version -> tensors of the plan, besides its own, that it stands in for, because the ops that make those did not run.
    needed: versions that the plan would drop too early, because of rebuilds that it does not know.
    until: (point of the graph, the versions that stay until backward is past it).
    """

    def __init__(self, last_point: int) -> None:
        self.stands: dict[int, list[int]] = {}
        self.needed: set[int] = set()
        self._last_point = last_point
        self.until: list[tuple[int, set[int]]] = []

    def keep(self, ids: set[int], until: int | None = None) -> None:
        """These versions stay until backward is past a point of the graph; None: to the end."""
        self.until.append((self._last_point if until is None else until, ids))
        self.needed |= ids

    def pass_point(self, now: int) -> Iterable[int]:
        """Backward is at this point of the graph. Returns the versions that are needed no more."""
        self.until = [(until, ids) for until, ids in self.until if until >= now]
        before, self.needed = self.needed, set().union(*(ids for _, ids in self.until))
        return before - self.needed
