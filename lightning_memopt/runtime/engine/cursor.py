"""How far a step has come in the plan, and how it deviates from it. Matcher, engine and session share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memopt.graph import BEFORE

NEVER = 1 << 62
"""A position that no forward reaches."""


@dataclass(slots=True)
class PlanDeviation:
    """How a forward and its backward differ from those of the plan. It outlives the engine.

    first: position and name of the first op that is not where the plan has it; None where all are.
    aside: all such ops are none of the plan's, and read neither weights nor tensors with a gradient (a metric, a log).
    unplanned_nbytes: bytes of results that autograd saved and that the plan does not know.
    excess_nbytes: by how much tensors that were recorded are larger than those of the graph that they are.
    astray: backward did not take the observed order: only a part of it, twice, or another order.
    changed: tensors of the plan that rebuilds start from and that were changed after the forward.
    """

    first: tuple[int, str] | None = None
    aside: bool = True
    unplanned_nbytes: int = 0
    excess_nbytes: int = 0
    astray: bool = False
    changed: set[int] = field(default_factory=set)


class Cursor:
    """Where a planned step is.

    position: the plan's forward op that comes next.
    furthest: the largest position at which an op was recorded so far.
    lost: the last op recorded was none of the plan's.
    point: the point of the graph whose segment ran last, in backward.
    fence: when the forward op at this position has run, bytes are to be gone (parking.py).
    deviation: from the plan, so far.
    """

    __slots__ = ("deviation", "fence", "furthest", "lost", "point", "position")

    def __init__(self) -> None:
        self.position = self.furthest = 0
        self.lost = False
        self.point = BEFORE
        self.fence = NEVER
        self.deviation = PlanDeviation()

    @property
    def on_plan(self) -> bool:
        """Whether the forward has not deviated so far."""
        return self.deviation.first is None

    @property
    def strict(self) -> bool:
        """Whether neither forward nor backward has deviated so far."""
        return self.deviation.first is None and not self.deviation.astray

    @property
    def past_fence(self) -> bool:
        """Whether the op has run after which bytes are to be gone."""
        return self.fence < self.position

    def advance(self) -> None:
        """The op at the position has run."""
        self.position += 1

    def skip_to(self, position: int) -> None:
        """The ops before this position have run, and nobody recorded them."""
        self.position = position

    def match(self, position: int) -> None:
        """The op that has just run is the plan's op at this position."""
        self.position = position + 1
        self.furthest = max(self.furthest, position)
        self.lost = False

    def deviate(self, name: str, aside: bool = False) -> None:
        """The op that has just run, of this name, is not the plan's op at the position. `aside`: see `PlanDeviation`."""
        self.lost = True
        self.deviation.aside = self.deviation.aside and aside
        if self.deviation.first is None:
            self.deviation.first = (self.position, name)

    def goes_astray(self) -> None:
        """Backward does not take the observed order."""
        self.deviation.astray = True
