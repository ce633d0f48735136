"""Tensors that stay longer than the plan says, because the forward deviates from the plan."""

from __future__ import annotations

from collections.abc import Iterable


class Guard:
    """Which storage versions a deviation keeps in memory, by their ids.

    stands: version -> tensors of the plan, besides its own, that it stands in for: the ops that make these tensors did not run.
    needed: versions that rebuilds need longer than the plan, which does not know these rebuilds, has them in memory.
    until: (point of the graph, the versions that stay until backward has passed it).
    """

    __slots__ = ("_last_point", "needed", "stands", "until")  # read by the native engine

    def __init__(self, last_point: int) -> None:
        self.stands: dict[int, list[int]] = {}
        self.needed: set[int] = set()
        self._last_point = last_point
        self.until: list[tuple[int, set[int]]] = []

    def keep(self, ids: set[int], until: int | None = None) -> None:
        """Keep these versions until backward has passed the point `until` of the graph; None: to the end."""
        self.until.append((self._last_point if until is None else until, ids))
        self.needed |= ids

    def pass_point(self, now: int) -> Iterable[int]:
        """Backward is at the point `now` of the graph. Returns the versions that are no longer needed."""
        self.until = [(until, ids) for until, ids in self.until if until >= now]
        before, self.needed = self.needed, set().union(*(ids for _, ids in self.until))
        return before - self.needed
