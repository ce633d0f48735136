"""How much of what rests a step parks, against all choices: within any limit, and beside the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from resting import resting

from lightning_memopt.plan import Machine, Plan
from lightning_memopt.plan.resting import Parked, Rests
from lightning_memopt.plan.states import StateOf
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.parking import Parking, Tried, by_seconds
from lightning_memopt.solvers.rollout import keep_all


class Case:
    """A step whose state and gradients may be parked, and which rebuilds nothing.

    parking: the choice of what it parks.
    limit_nbytes: the limit for what is solved.
    given: what was solved for so far, and whether a plan for it was known.
    """

    def __init__(self, seed: int) -> None:
        case = resting(seed)
        self.parking = Parking(case.graph, lambda _: case.chunks, False, self._solved)
        self.all = self.parking.parked(Rests(tuple(each for each in case.rests if isinstance(each, StateOf))))
        self.limit_nbytes = 0
        self.given: list[tuple[int, bool]] = []

    def _solved(self, parked: Parked, known: Plan | None) -> Tried:
        self.given.append((len(parked.rests), known is not None))
        frontier = planner.of_one(parked.graph, ("by hand", keep_all(parked.graph)), Machine())
        needed = frontier.smallest_nbytes
        frontier = replace(frontier, rests=parked.rests)
        return Tried(parked, frontier, needed <= self.limit_nbytes, parked.rests.seconds, needed)

    def choices(self) -> list[Tried]:
        """What is solved for each choice of what to park."""
        each = self.all.rests.states
        choices = chain.from_iterable(combinations(each, count) for count in range(len(each) + 1))
        return [self._solved(self.parking.parked(Rests(states)), None) for states in choices]


def test_what_is_chosen_keeps_the_limit_and_is_between_the_bound_and_all_parked() -> None:
    tight = 0
    for case in map(Case, range(15)):
        choices = case.choices()
        needed = [int(each.nbytes) for each in choices]
        for case.limit_nbytes in range(needed[-1], needed[0] + 1, 5):
            case.given.clear()
            found = min(case.parking.within(case.all, case.limit_nbytes), key=by_seconds)
            assert found.fits and case.given[0] == (len(case.all.rests), False)
            assert len(case.given) <= 3 and all(known for _, known in case.given[1:])
            least = min(each.seconds for each in choices if each.nbytes <= case.limit_nbytes)
            bound = case.parking.least_seconds(case.all, case.limit_nbytes)
            assert bound <= least <= found.seconds <= choices[-1].seconds
            tight += bound > 0
    assert tight


def test_a_tier_with_little_room_gets_the_cheapest() -> None:
    """The step is priced again for what is parked then."""
    case = Case(0)
    cheapest = case.all.rests.by_price()[0]
    some = case.parking.parked(case.all.rests, cheapest.parking.tier_nbytes)
    assert some.rests.by_price() == [cheapest]
    assert not case.parking.parked(case.all.rests, 0).rests


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_step_is_fast_enough_where_one_is(seed: int) -> None:
    case = Case(seed)
    whole, everything = (case._solved(each, None) for each in (Parked(case.parking.graph, Rests(), ()), case.all))
    assert case.parking.smallest(case.all, whole, everything.seconds).nbytes == everything.nbytes < whole.nbytes
    assert case.parking.smallest(case.all, whole, everything.seconds / 2) is whole
