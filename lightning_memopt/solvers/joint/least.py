"""The plan that needs the fewest bytes of the device within the limits of tiers, and the one that takes the fewest bytes of a
tier within a budget. Neither looks at seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Rebuild, lower, simulate
from lightning_memopt.plan.forms import EXACT, codec_of, tier_of
from lightning_memopt.plan.model import saved_in_tiers
from lightning_memopt.plan.tiers import Limits, within
from lightning_memopt.solvers.joint import choice
from lightning_memopt.solvers.joint.bound import Forms
from lightning_memopt.solvers.offload.trips import Form, TripPlanner, send_away
from lightning_memopt.solvers.rollout import keep_all

Lives = tuple[Life, ...]
Needed = Callable[[Lives], int]
"""The bytes of the device that a plan needs."""
_TRIES = 8
"""Maximum number of plans for which tensors are chosen because not all that may be parked fits."""
_TARGETS = 4
"""Maximum number of targets to try if a plan needs more bytes than a choice counts."""
_CHOICE_SECONDS = 0.4


def allowed(graph: Graph, lives: Iterable[Life], forms: Forms) -> dict[int, Sequence[Form]]:
    """The forms, without inexact ones for tensors that a rebuild reads."""
    read = {
        t
        for steps in lower(graph, lives).segments.values()
        for step in steps
        if isinstance(step, Rebuild)
        for t in graph.ops[step.op].inputs
    }
    return {t: [f for f in offered if t not in read or codec_of(f[0]) in EXACT] for t, offered in forms.items()}


class _Instant:
    """Rates by which links and codecs take no time, so that tensors are parked for as long as possible."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return 0.0

    in_seconds = encode_seconds = decode_seconds = out_seconds


class _Start:
    """A plan without parked tensors, and what it needs if every tensor that can be parked is, in its smallest form and for as
    long as possible.
    """

    def __init__(self, graph: Graph, lives: Lives, forms: Forms, needed: Needed) -> None:
        self.graph, self.lives = graph, lives
        self.planner, self.forms = TripPlanner(graph, lives, _Instant()), allowed(graph, lives, forms)
        all_of_them = {t: min(self.forms[t], key=_device_nbytes) for t in self.planner.gaps if self.forms.get(t)}
        self.all_parked = self.parking(all_of_them)
        self.nbytes = needed(self.all_parked)

    def parking(self, parked: dict[int, Form]) -> Lives:
        return send_away(self.lives, self.planner.plan(parked))

    @property
    def levels(self) -> Sequence[int]:
        return simulate(self.graph, self.lives).nbytes

    def smallest(self, limits: Limits) -> Lives:
        args = self.graph, self.planner, self.levels, self.nbytes, self.forms, _Instant(), _CHOICE_SECONDS, limits
        return self.parking(choice.smallest(*args))

    def fewest(self, budget_nbytes: int, tier: str, needed: Needed) -> Lives | None:
        """A plan within the budget that takes the fewest bytes of the tier."""
        target = budget_nbytes
        for _ in range(_TARGETS):
            args = self.graph, self.planner, self.levels, target, self.forms, _Instant(), _CHOICE_SECONDS, tier
            parked = choice.fewest(*args)
            if parked is None:
                break
            lives = self.parking(parked)
            excess = needed(lives) - budget_nbytes
            if excess <= 0:
                return lives
            target -= excess
        return self.all_parked if self.nbytes <= budget_nbytes else None


def _starts(graph: Graph, plans: Iterable[Lives], forms: Forms, needed: Needed) -> Iterator[_Start]:
    """The plans without parked tensors, those first that need the fewest bytes if all that can be parked is."""
    return iter(sorted((_Start(graph, p, forms, needed) for p in (keep_all(graph), *plans)), key=lambda start: start.nbytes))


def least(
    graph: Graph,
    plans: Iterable[Lives],
    forms: Forms,
    needed: Needed | None = None,
    limits: Limits = MappingProxyType({}),
) -> tuple[int, Lives]:
    """The fewest bytes that one of these plans needs, and its lives, if as much of it is parked as helps, within the limits.
    `needed`: gives the bytes that a plan needs; by default its peak.
    """
    needs = needed or (lambda lives: simulate(graph, lives).predicted.peak_nbytes)
    best: tuple[int, Lives] | None = None
    tries = _TRIES
    for start in _starts(graph, plans, forms, needs):
        if best is not None and best[0] <= start.nbytes:
            break  # it parks more than it may, and needs as much
        found = start.all_parked
        if not within(saved_in_tiers(found), limits):
            found = start.smallest(limits) if tries else start.lives
            tries -= bool(tries)
        nbytes = needs(found)
        if best is None or nbytes < best[0]:
            best = nbytes, found
    assert best is not None
    return best


def fewest_in_tier(
    graph: Graph, plans: Iterable[Lives], forms: Forms, budget_nbytes: int, tier: str, needed: Needed | None = None
) -> Lives | None:
    """The lives of a plan that fits the budget and takes the fewest bytes of a tier; None if no plan does."""
    needs = needed or (lambda lives: simulate(graph, lives).predicted.peak_nbytes)
    best: tuple[int, Lives] | None = None
    for _, start in zip(range(_TRIES), _starts(graph, plans, forms, needs), strict=False):
        lives = start.fewest(budget_nbytes, tier, needs) if start.nbytes <= budget_nbytes else None
        if lives is not None:
            nbytes = saved_in_tiers(lives).get(tier, 0)
            if best is None or nbytes < best[0]:
                best = nbytes, lives
    return None if best is None else best[1]


def _device_nbytes(form: Form) -> int:
    return 0 if tier_of(form[0]) else form[1]
