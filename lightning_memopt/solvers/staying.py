"""What a plan need not park of what rests: optimizer state, gradients and weights that its budget has room for.

In: a step in which all of it is parked, a plan for that step, and a budget. Out: what may stay on the device. State that stays
takes its bytes at every point, a gradient from the point on at which it would leave, a weight where its module does not
run. So where a step has most bytes for a short time only, what is not there at that time stays.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE, Graph, Tensor
from lightning_memopt.plan import LoweringError, Plan, simulate, updated
from lightning_memopt.plan.resting import Parked, Rests
from lightning_memopt.plan.states import PARKED_STATE, Chunks, StateOf
from lightning_memopt.plan.weights import UnitOf
from lightning_memopt.solvers.frontier import Frontier

_SHARES = 4
"""Number of shares of what rests that are tried: one of them, two, and so on."""
_TRIES = 4
"""Maximum number of choices of what to park."""

Span = tuple[int, int]


def staying(
    graph: Graph, plan: Plan, parked: Sequence[StateOf | UnitOf], chunks: Chunks, limit_nbytes: int, weights: bool = True
) -> list[StateOf | UnitOf]:
    """Of `parked`, what stays: what costs most seconds for the bytes that it takes comes first, or for these bytes and the
    points at which it takes them, whichever saves more. `graph`, `plan`: with all of it parked. `chunks`: those of the update
    then. `limit_nbytes`: of tensors and workspaces. `weights`: whether weights may stay.
    """
    step = updated(graph, plan.updates)
    room = limit_nbytes - np.array(simulate(step, plan.lives).nbytes, dtype=np.int64)
    of = _spans(graph)
    spans = [of(each) for each in parked]
    by_bytes = [each.parking.seconds / each.parking.nbytes for each in parked]
    points = [max(1, sum(last - first + 1 for first, last in own)) for own in spans]
    by_points = [price / count for price, count in zip(by_bytes, points, strict=True)]
    usual = [] if graph.updates else [t for t in graph.tensors if t.name == PARKED_STATE and t.nbytes]
    may_stay = [place for place, each in enumerate(parked) if weights or not isinstance(each, UnitOf)]

    def filled(prices: Sequence[float]) -> list[int]:
        places = sorted(may_stay, key=lambda place: -prices[place])
        return _filled(room.copy(), parked, spans, _Updates(graph, usual, chunks, parked), places)

    tries = [filled(by_bytes), filled(by_points)]
    best = max(tries, key=lambda found: sum(parked[place].parking.seconds for place in found))
    return [parked[place] for place in best]


def least_parked(
    frontier: Frontier, parked: Parked, limit_nbytes: int, needed_nbytes: Callable[[Rests, Plan], int]
) -> tuple[Rests, Plan] | None:
    """What to park for the fastest step within the limit, and a plan for it that is known; None: everything. `frontier`: of the
    step in which everything is parked, which is `parked`. `needed_nbytes`: bytes that a plan needs where only some is parked;
    the chunks of the update are others then. If that is more, another choice is made with less room. It raises LoweringError
    where the plan cannot run then, because it rebuilds from a weight that is elsewhere.
    """
    room = limit_nbytes
    above = 0
    weights = True
    tried: Rests | None = None
    for _ in range(_TRIES):
        some, plan = _fastest(frontier, parked, room, weights)
        while some == tried:  # what is chosen takes less than all the room
            above *= 2
            room -= above
            some, plan = _fastest(frontier, parked, room, weights)
        if plan is None or len(some) == len(parked.rests):
            return None
        try:
            above = needed_nbytes(some, plan) - limit_nbytes
        except LoweringError:  # a weight whose copy began beside another module's computing now comes later
            weights = False
            continue
        if above <= 0:
            return some, plan
        room -= above
        tried = some
    return None


def share_parked(frontier: Frontier, parked: Parked, limit_nbytes: int) -> tuple[Rests, Plan] | None:
    """As `least_parked`, of a few shares of what rests, the cheapest first, so that plans have room that they do not need yet:
    with less parked, there may be faster ones. The plan is not known to keep the limit.

    State that stays takes its bytes at every point of a step. So the plans of a step that parks less are those of the step
    that parks all, for a budget that is smaller by what stays. Weights that stay take no more than that.
    """
    cheapest = parked.rests.by_price()
    nbytes = [0, *accumulate(each.parking.nbytes for each in cheapest)]
    seconds = [0.0, *accumulate(each.parking.seconds for each in cheapest)]
    best = math.inf
    found: tuple[Rests, Plan] | None = None
    for count in sorted({bisect_left(nbytes, k * nbytes[-1] / _SHARES) for k in range(1, _SHARES + 1)}):
        with contextlib.suppress(InfeasibleError):
            plan = frontier.known_plan(limit_nbytes - (nbytes[-1] - nbytes[count]))
            taken = plan.predicted.seconds - seconds[-1] + seconds[count]  # the plan has all copies
            if taken < best:
                best = taken
                found = None if count == len(cheapest) else (parked.rests.only(cheapest[:count]), plan)
    return found


def _fastest(frontier: Frontier, parked: Parked, limit_nbytes: int, weights: bool) -> tuple[Rests, Plan | None]:
    """What to park beside each of a few plans, whichever is fastest: what has room stays, however little that is. Where that
    room is needed for a short time only, what is not there at that time stays. `weights`: whether they may stay.
    """
    everything = parked.rests.by_price()
    nbytes = sum(each.parking.nbytes for each in everything)
    best = math.inf
    fastest: tuple[Rests, Plan | None] = parked.rests, None
    for share in range(_SHARES):
        with contextlib.suppress(InfeasibleError):
            plan = frontier.known_plan(limit_nbytes - nbytes * share // _SHARES)
            most_nbytes = limit_nbytes - frontier.candidate_of(plan).beside_peak_nbytes
            stays = staying(frontier.graph, plan, everything, parked.chunks, most_nbytes, weights)
            seconds = plan.predicted.seconds - sum(each.parking.seconds for each in stays)  # the plan has all copies
            if seconds < best:
                best = seconds
                kept = {id(each) for each in stays}
                fastest = parked.rests.only([each for each in everything if id(each) not in kept]), plan
    return fastest


class _Updates:
    """What the update after backward has on the device beside what is there anyway, while less and less is parked.

    spans: where it runs.
    nbytes: what it has there now: the largest chunk, and what comes ahead.
    """

    def __init__(self, graph: Graph, usual: Sequence[Tensor], chunks: Chunks, parked: Sequence[StateOf | UnitOf]) -> None:
        """`usual`: the tensors that the step has for it; none if it is not known, and then nothing is taken from it."""
        self._graph = graph
        nbytes = Counter[Span]()
        for t in usual:
            nbytes[max(0, t.born_at), t.freed_at] += t.nbytes
        self.spans = list(nbytes)
        self.nbytes = max(nbytes.values(), default=0)
        own = [chunk for own in chunks for chunk in own]
        self._all = [chunk.beside_nbytes for chunk in own]  # what is on the device for each chunk
        # the chunk before, where the state of this one comes while that is updated
        firsts = set(accumulate((len(each) for each in chunks), initial=0))
        self._before = [i - 1 if chunk.comes_ahead and i not in firsts else None for i, chunk in enumerate(own)]
        self._of: dict[str, int] = {}
        for i, chunk in enumerate(own):
            for name in chunk.parameters:
                self._of.setdefault(name, i)  # of several optimizers, the first has it
        for each in parked:
            self._add(each, 1)

    def _places(self, each: StateOf | UnitOf) -> list[tuple[int, int]]:
        """The chunks for which it is on the device, and the bytes that they have of it."""
        if isinstance(each, UnitOf):
            trained = (self._graph.tensors[t] for t in each.unit.trained)
            return [(self._of[t.name], t.nbytes) for t in trained if t.name in self._of]
        i, nbytes = self._of.get(each.parking.parameter), sum(each.sizes)
        if i is None:
            return []
        before = self._before[i] if each.parking.what == "state" else None
        return [(i, nbytes)] if before is None else [(before, nbytes), (i, nbytes)]

    def _add(self, each: StateOf | UnitOf, sign: int) -> None:
        for i, nbytes in self._places(each):
            self._all[i] += sign * nbytes

    def without(self, each: StateOf | UnitOf) -> int:
        """Bytes by which it has less if this stays."""
        if not self.spans or all(self._all[i] < self.nbytes for i, _ in self._places(each)):
            return 0  # another chunk is the largest
        self._add(each, -1)
        now = max(self._all)
        self._add(each, 1)
        return max(0, self.nbytes - now)

    def stays(self, each: StateOf | UnitOf) -> None:
        """This stays."""
        self.nbytes -= self.without(each)
        self._add(each, -1)


def _filled(
    room: npt.NDArray[np.int64],
    parked: Sequence[StateOf | UnitOf],
    spans: Sequence[list[Span]],
    updates: _Updates,
    places: Sequence[int],
) -> list[int]:
    """Places of what stays. `room`: bytes at each point. `places`: of what may stay, the first come first."""
    found: list[int] = []
    again = True
    while again:
        left: list[int] = []
        again = False
        for place in places:
            each = parked[place]
            less = updates.without(each)
            for first, last in updates.spans if less else ():
                room[first : last + 1] += less
            if all(room[first : last + 1].min() >= each.parking.nbytes for first, last in spans[place]):
                for first, last in spans[place]:
                    room[first : last + 1] -= each.parking.nbytes
                updates.stays(each)
                found.append(place)
                again |= less > 0  # what had no room beside a larger chunk may have some now
            else:
                left.append(place)
                for first, last in updates.spans if less else ():
                    room[first : last + 1] -= less
        places = left
    return sorted(found)


def _spans(graph: Graph) -> Callable[[StateOf | UnitOf], list[Span]]:
    """What rests -> the points at which it is on the device only if it stays, as stretches, or slightly longer ones. `graph`:
    with all of it parked.
    """
    last = len(graph.points) - 1
    everywhere = [(0, last)] if graph.points else []
    left = {t.name for t in graph.tensors if t.kind == "gradient" and t.born_at == BEFORE}

    def of(each: StateOf | UnitOf) -> list[Span]:
        if isinstance(each, UnitOf):
            edges = [-1]
            for first, end in graph.tensors[each.unit.weights[0]].windows:
                edges += [first, end]
            edges.append(last + 1)
            return [(edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2) if edges[i + 1] - edges[i] > 1]
        name = each.parking.parameter
        if each.parking.what == "state" or name not in graph.gradients or f"{name}.grad" in left:
            return everywhere
        gradient, point = graph.gradients[name]
        if graph.tensors[graph.tensors[gradient].storage].born_at == BEFORE:
            return everywhere
        gone = max(point, graph.tensors[gradient].freed_at) + 1
        return [(gone, last)] if gone <= last else []

    return of
