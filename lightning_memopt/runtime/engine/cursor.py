"""How far a step has come in the plan, and how it deviates from the plan. Matcher, engine and session share these objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lightning_memopt.graph import BEFORE

NEVER = 1 << 62
"""A position that no forward reaches."""


@dataclass(slots=True)
class PlanDeviation:
    """How a forward and its backward differ from those of the plan. It outlives the engine.

    first: position and name of the first op that is not the plan's op at its position; None if there is no such op.
    aside: whether the deviating ops are all extra ops that read neither weights nor tensors with a gradient (a metric, a log).
    unplanned_nbytes: bytes of tensors that autograd saved and that the plan does not know.
    unparked_nbytes: bytes of tensors that the plan parks, and that the tier has no room for.
    excess_nbytes: bytes by which recorded tensors are larger than the graph's tensors that they match.
    out_of_order: whether backward ran in another order than observed, ran only in part, or ran twice.
    changed: tensors of the plan from which rebuilds start and which were changed after the forward.
    """

    first: tuple[int, str] | None = None
    aside: bool = True
    unplanned_nbytes: int = 0
    unparked_nbytes: int = 0
    excess_nbytes: int = 0
    out_of_order: bool = False
    changed: set[int] = field(default_factory=set)


class Cursor:
    """How far a planned step has come. Its fields belong to the native engine, where that is loaded (`cursor_for`).

    position: number of the plan's forward op that comes next.
    furthest: the largest position at which an op was recorded so far.
    lost: whether the last recorded op is not an op of the plan.
    point: in backward, the point of the graph whose segment ran last.
    turn: in backward, the index in `Program.events` of the event that comes next.
    fence: position of the forward op after which the bytes of a parked tensor must be dropped (parking.py).
    deviation: how the step deviates from the plan so far.
    on_plan: whether the forward has not deviated so far.
    out_of_order: `PlanDeviation.out_of_order`.
    asked: whether autograd has asked for a save, so that a backward has begun.
    """

    position: int
    furthest: int
    lost: bool
    point: int
    turn: int
    fence: int
    on_plan: bool
    out_of_order: bool
    asked: bool

    def __init__(self) -> None:
        self.position = self.furthest = self.turn = 0
        self.lost = self.asked = self.out_of_order = False
        self.on_plan = True
        self.point = BEFORE
        self.fence = NEVER
        self.deviation = PlanDeviation()

    @property
    def strict(self) -> bool:
        """Whether neither forward nor backward has deviated so far."""
        return self.on_plan and not self.out_of_order

    @property
    def past_fence(self) -> bool:
        """Whether the op at the fence has run."""
        return self.fence < self.position

    def advance(self) -> None:
        """The op at the position has run."""
        self.position += 1

    def skip_to(self, position: int) -> None:
        """The ops before this position have run unrecorded."""
        self.position = position

    def match(self, position: int) -> None:
        """The op that has just run is the plan's op at this position."""
        self.position = position + 1
        self.furthest = max(self.furthest, position)
        self.lost = False

    def deviate(self, name: str, aside: bool = False) -> None:
        """The op that has just run, `name`, is not the plan's op at the position. `aside`: see `PlanDeviation`."""
        self.lost, self.on_plan = True, False
        self.deviation.aside = self.deviation.aside and aside
        if self.deviation.first is None:
            self.deviation.first = (self.position, name)

    def deviate_in_backward(self) -> None:
        """Backward does not run in the observed order."""
        self.out_of_order = self.deviation.out_of_order = True


@cache
def cursor_for(native: Any) -> type[Cursor]:
    """The class of cursors: their fields belong to `native`, the native engine, if there is one."""
    return Cursor if native is None else type("Cursor", (Cursor, native.Progress), {"__slots__": ()})
