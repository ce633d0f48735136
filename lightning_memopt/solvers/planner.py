"""Runs all solvers on a graph, and keeps the plans that no other is both smaller and faster than (frontier.py).

The plans of all solvers are collected and priced by the same simulator: keep-all, checkpointing of each sharded unit, the
op-level minimum cuts of the whole graph, Echo, and the dynamic programme over a chain at many levels of memory. If the budget
is known, a local search adds plans for it. Only the Pareto set is kept, so the frontier is monotone: a smaller budget never
yields a larger peak, and a larger budget never yields a slower plan.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from lightning_memopt.clocks import perf_counter, thread_time
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import LATE_HOOK, Graph, Op, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, Machine, Overhead, Prediction, simulate, updated
from lightning_memopt.plan.model import Objective
from lightning_memopt.solvers import chain as dp
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.frontier import UNSEEN_NBYTES, Candidate, Frontier, with_reserved
from lightning_memopt.solvers.recompute import bound, local_search, stage_chain
from lightning_memopt.solvers.recompute.baselines import per_unit
from lightning_memopt.solvers.recompute.between import mixed, moments_between
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.recompute.stages import COARSE, FINE, cut, given_tensors
from lightning_memopt.solvers.recompute.windows import held_at_boundaries
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.units import ceil_div, format_nbytes

__all__ = ["UNSEEN_NBYTES", "Candidate", "Frontier", "of_one", "smallest", "smallest_nbytes", "solve"]

_LEVELS = 160
"""Number of memory levels of the chain programme from which plans are taken."""

_HORIZONS = (0.3, 0.1)
"""Single-level plans keep a rebuilt tensor for one of these shares of backward. One more variant keeps it until the end."""

_GAP = 0.02
"""Two neighbours on the frontier get plans between them if they differ by more than this share of the larger one's bytes."""
_GAPS, _PARTS = 48, 4
"""Maximum number of such gaps that are filled, and the number of parts into which each is cut."""

_OF_BOUND = 12
"""Number of cuts at a point from which the bound is proven, if plans are made from other cuts."""

_PRICED = 24
"""Minimum number of plans of the frontier that get an exact price. When time is up, the others are left out."""

_EARLY = 0.75
"""Share of the time for faster plans that goes to the solvers. The rest is for searches near the budgets, which take a few
seconds and find the best plans.
"""

_TIE = 1e-3
_OP_SECONDS, _BYTES_PER_SECOND, _FLOPS_PER_SECOND = 1e-6, 1e9, 8e9
"""Rates of an assumed machine, for plans that must not depend on measured times. Only their ratios matter; they are those of
one CPU core.
"""

Progress = Callable[[str], None]
Named = tuple[str, tuple[Life, ...]]
"""A plan, as the name of its solver and its lives."""
_smallest_budget = attrgetter("least_budget_nbytes")


def _late_nbytes(graph: Graph) -> int:
    """Bytes left free in a budget on the CPU for the buffers of one collective, which may be freed only after the hook that ran
    the collective.
    """
    hooks = (op.workspace_nbytes for op in graph.ops if op.name == LATE_HOOK)
    return max(hooks, default=0) if kind_of(graph.device).is_host else 0


def _plain(graph: Graph) -> Iterator[Named]:
    """Plans that need no solver: keep everything, and checkpoint each unit of sharded modules."""
    yield "keep all", keep_all(graph)
    if graph.windowed:
        yield "each unit checkpointed", per_unit(graph)


def _whole_graph(moment: bound.Moment) -> Iterator[Named]:
    """Single-level plans: hold the tensors of a cut and those that cost nothing at its point, and rebuild the rest just in
    time.
    """
    for vertex in moment.hull.vertices:
        for lives in _holding(moment, vertex.held):
            yield f"minimum cut, {format_nbytes(vertex.nbytes)} held", lives


def _holding(moment: bound.Moment, held: frozenset[int]) -> Iterator[tuple[Life, ...]]:
    """Plans that hold these tensors at a moment."""
    problem, graph = moment.problem, moment.problem.graph
    unpacks = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
    spare = {t for _, t in unpacks}.difference(problem.needed).union(filter(problem.given, graph.producers))
    lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}
    always = unrepeatable(graph)
    for horizon in (None, *(int(share * (unpacks[-1][0] - unpacks[0][0])) for share in _HORIZONS)):
        roll = Rollout(graph)
        roll.serve((r for r in unpacks if r[0] >= moment.since), (spare | held) - lost | always, horizon)
        yield roll.lives()


def _chains(graph: Graph) -> list[tuple[str, stage_chain.ModelChain]]:
    """The graph as chains of coarse and of fine stages, with and without ambient tensors."""
    seen: set[tuple[int, ...]] = set()
    models = []
    for span, share in itertools.product((0.2, 2.0), (COARSE, FINE)):
        stages = cut(graph, given=given_tensors(graph, span), share=share)
        key = tuple(s.first for s in stages.spans)
        if key not in seen and len(stages.spans) > 1:
            seen.add(key)
            with contextlib.suppress(LoweringError):  # a stage that backward needs in the windows of several units
                models.append((f"chain of {len(stages.spans)} stages", stage_chain.build(stages)))
    return models


def _chain(graph: Graph, limit: int, detail: Progress) -> Iterator[Named]:
    """Chain plans at many levels."""
    for name, model in _chains(graph):
        table = dp.solve_chain(model.chain, limit)
        levels = table.levels()
        detail(f"{name}, {len(levels)} levels")
        step = max(1, ceil_div(len(levels), _LEVELS))
        for level in sorted({*levels[::step], *levels[:8]}):
            yield name, stage_chain.lives(model, table.tree(level))


def _of_few_bytes(graph: Graph) -> Iterator[Named]:
    """Plans for few bytes, each solver's own."""
    yield "Echo", echo(graph)
    for moment in bound.moments(graph, vertices=6):
        yield from _whole_graph(moment)
    for name, model in _chains(graph):
        yield f"{name}, smallest", stage_chain.lives(model, dp.smallest_tree(model.chain))


def _smallest(graph: Graph) -> Iterator[Named]:
    """Plans for few bytes that do not depend on measured times: the seconds of ops are computed from their bytes and FLOPs."""

    def seconds(op: Op) -> float:
        nbytes = sum(graph.tensors[t].nbytes for t in {*op.inputs, *op.outputs})
        return _OP_SECONDS + nbytes / _BYTES_PER_SECOND + op.flops / _FLOPS_PER_SECOND

    timeless = replace(graph, ops=tuple(replace(op, seconds=seconds(op)) for op in graph.ops))
    plans = list[tuple[Life, ...]]()
    for solver, lives in _of_few_bytes(timeless):
        plans.append(lives)
        yield solver, lives
    smaller = local_search.smaller(timeless, plans)
    if smaller is not None:
        yield "local search, smallest", smaller


def smallest(graph: Graph, machine: Machine | None = None, enough_nbytes: int = 0) -> Candidate:
    """A plan for few bytes, without solving anything else: it tells quickly whether a budget can be kept at all.
    `enough_nbytes`: the search ends at a plan that needs no more.
    """
    saves = any(s.tensor in graph.producers for s in graph.saves)
    plans = itertools.chain(_plain(graph), _smallest(held_at_boundaries(graph)) if saves else ())
    late = _late_nbytes(graph)
    reserve = (machine or Machine()).reserve(graph)
    made: list[Candidate] = []
    for solver, lives in plans:
        with contextlib.suppress(LoweringError):
            candidate = Candidate(lives, simulate(graph, lives).predicted, solver, late)
            made.append(candidate)
            if candidate.least_budget_nbytes <= enough_nbytes:  # reserved bytes come on top, and take longer to compute
                whole = with_reserved(candidate, reserve)
                if whole.least_budget_nbytes <= enough_nbytes:
                    return whole
    return with_reserved(min(made, key=_smallest_budget), reserve)


def smallest_nbytes(graph: Graph, machine: Machine | None = None, enough_nbytes: int = 0) -> int:
    """Bytes that `smallest` needs. Without `enough_nbytes` they are `Frontier.smallest_nbytes`."""
    return smallest(graph, machine, enough_nbytes).least_budget_nbytes


def of_one(graph: Graph, plan: Named, machine: Machine) -> Frontier:
    """The frontier of a plan that is known, and of no others: nothing is searched."""
    solver, lives = plan
    predicted = simulate(graph, lives).predicted
    candidate = _priced(Candidate(lives, predicted, solver, _late_nbytes(graph)), predicted, machine.overhead)
    candidate = with_reserved(candidate, machine.reserve(graph))
    return Frontier(
        graph=graph,
        candidates=(candidate,),
        smallest_nbytes=candidate.least_budget_nbytes,
        unmodified_peak_nbytes=max(unmodified_levels(machine.usual_step(graph)), default=0),
        moments=(),
        seconds=0.0,
        machine=machine,
        searched=False,
    )


def _priced_by_flops(graph: Graph) -> Graph:
    """The graph with seconds in proportion to FLOPs. A small share of the measured time breaks ties."""
    rate = graph.step_seconds / max(1, sum(op.flops for op in graph.ops))
    return replace(graph, ops=tuple(replace(op, seconds=op.flops * rate + op.seconds * _TIE) for op in graph.ops))


def _pareto(plans: Iterable[Candidate], objective: Objective, rebuilt_op_seconds: float = 0.0) -> list[Candidate]:
    """The Pareto set, with peaks rising and the objective falling. `rebuilt_op_seconds`: the engine's seconds for each op that
    runs again, in addition to the op's own.
    """

    def price(c: Candidate) -> tuple[float, ...]:
        p = c.predicted
        seconds = p.seconds + rebuilt_op_seconds * p.rebuilt_ops
        return (seconds,) if objective == "throughput" else (p.extra_flops, seconds)

    best: list[Candidate] = []
    for c in sorted(plans, key=lambda c: (c.least_budget_nbytes, *price(c), c.predicted.rebuilt_ops)):
        if not best or price(c) < price(best[-1]):
            best.append(c)
    return best


def _between(graph: Graph, front: Callable[[], list[Candidate]]) -> Iterator[Named]:
    """Plans between neighbours of the frontier that are far apart, the widest gap first. `front`: returns the present
    frontier.
    """
    filled: set[tuple[int, int]] = set()
    for _ in range(_GAPS):
        pairs = itertools.pairwise(front())
        gaps = [
            (large.least_budget_nbytes - small.least_budget_nbytes, small, large)
            for small, large in pairs
            if large.least_budget_nbytes - small.least_budget_nbytes > _GAP * large.least_budget_nbytes
            and (id(small), id(large)) not in filled
        ]
        if not gaps:
            return
        _, small, large = max(gaps, key=lambda gap: gap[0])
        filled.add((id(small), id(large)))
        for moment in moments_between(graph, small.lives, large.lives, _PARTS):
            for early, late in ((small, large), (large, small)):
                with contextlib.suppress(LoweringError):
                    yield "mixed", mixed(graph, early.lives, late.lives, moment)


def _near(
    graph: Graph,
    front: list[Candidate],
    budget_nbytes: int,
    reserve: Callable[[tuple[Life, ...]], int] | None,
    over: Callable[[], bool],
    thorough: bool,
) -> Iterator[Named]:
    """Plans for a budget that a local search reaches from plans of the frontier. `over`: whether time is up."""
    fitting = bisect_right([c.least_budget_nbytes for c in front], budget_nbytes)
    if fitting < len(front):  # the unmodified step does not fit
        near = with_reserved(front[max(0, fitting - 1)], reserve)
        beside = near.predicted.needed_nbytes - near.predicted.peak_nbytes + near.beside_nbytes + UNSEEN_NBYTES
        for lives in local_search.within(graph, [c.lives for c in front], fitting, budget_nbytes - beside, over, thorough):
            yield "local search", lives


def _priced_first(front: list[Candidate], budgets: Collection[int]) -> list[int]:
    """The positions of a frontier in the order in which they get an exact price: first its ends, then the plans for the
    budgets, then those in between, ever more densely.
    """
    last = len(front) - 1
    near = (bisect_right([c.least_budget_nbytes for c in front], budget) for budget in budgets)
    chosen = [0, last, *(i for fitting in near for i in (fitting - 1, fitting - 2, fitting) if 0 <= i <= last)]
    stride = last
    while stride > 1:
        stride = ceil_div(stride, 2)
        chosen += range(0, last, stride)
    return list(dict.fromkeys(chosen))


def _priced(candidate: Candidate, predicted: Prediction, overhead: Overhead) -> Candidate:
    """The candidate with its exact price. `predicted`: its price without the engine's own work."""
    return replace(candidate, predicted=replace(predicted, overhead_seconds=overhead.of(candidate.lives)))


class _Search:
    """The plans of a graph that are made until time is up.

    made: what each of them needs. moments: those at which the bound is proven.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        objective: Objective,
        beside: Callable[[tuple[Life, ...]], int],
        clock: Callable[[], float],
        limit_seconds: float,
    ) -> None:
        """See `solve`."""
        self.graph = graph
        self.machine = machine
        self.objective = objective
        self.reserve = machine.reserve(graph)
        self.made: list[Candidate] = []
        self.moments: list[bound.Moment] = []
        self._beside = beside
        self._late_nbytes = _late_nbytes(graph)
        self._known: set[tuple[Life, ...]] = set()
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._faster_since = clock()
        self._last = self._faster_since + limit_seconds
        self._end = self._last

    def add(self, plans: Iterable[Named], say: Progress, detail: Progress, needed: Callable[[], bool] = lambda: False) -> bool:
        """Price these plans and add them to those made. Returns whether there was time for all. `needed`: whether to go on
        although time is up.
        """
        for solver, lives in plans:
            try:
                if lives not in self._known:  # a third of all plans is found by several solvers; the first one gets the credit
                    self._known.add(lives)
                    beside_nbytes = self._late_nbytes + self._beside(lives)
                    self.made.append(Candidate(lives, simulate(self.graph, lives).predicted, solver, beside_nbytes))
            except LoweringError:
                if not self.graph.windowed:  # usual in a sharded model: a chain may need weights of several units
                    detail(f"a plan of {solver} needs a tensor that cannot be made; left out")
            if self.is_over() and not needed():
                if self._end < self._last:
                    say(f"{len(self.made)} plans made; a longer search would take more time than it saves")
                else:
                    say(f"time limit of {self._limit_seconds:g} s reached with {len(self.made)} plans")
                return False
        return True

    def is_over(self) -> bool:
        return self._clock() > self._end

    def left_seconds(self) -> float:
        """Seconds until the time limit, whatever faster plans may take."""
        return self._last - self._clock()

    def for_faster_plans(self, seconds: float) -> None:
        """Plans for few bytes are known: from now on, faster ones are made, for so many seconds at most."""
        self._faster_since = self._clock()
        self._end = min(self._end, self._faster_since + seconds)

    def early(self, plans: Iterator[Named]) -> Iterator[Named]:
        """Those of these plans that are made in the first part of that time."""
        until = self._faster_since + _EARLY * (self._end - self._faster_since)
        while self._clock() < until and (plan := next(plans, None)) is not None:
            yield plan

    def fewest(self) -> Candidate:
        """The plan with the smallest budget so far."""
        return with_reserved(min(self.made, key=_smallest_budget), self.reserve)

    def front(self) -> list[Candidate]:
        return _pareto(self.made, self.objective, self.machine.overhead.rebuilt_op)

    def faster(self, graph: Graph, budgets: Collection[int], dense: bool, thorough: bool, detail: Progress) -> Iterator[Named]:
        """Plans that depend on the seconds of ops, and the moments of the bound. `graph`: the step that plans are made for. The
        others: see `solve`.
        """
        priced = self.machine.overhead.added_to(graph) if self.objective == "throughput" else _priced_by_flops(graph)
        yield "Echo", echo(priced)
        # the bound holds for all plans, also for those that no solver finds
        is_priced = priced is self.graph
        self.moments.extend(bound.moments(self.graph) if is_priced else bound.moments(self.graph, _OF_BOUND))
        for moment in self.moments if is_priced else bound.moments(priced):
            yield from _whole_graph(moment)
        chains = _chain(priced, max(unmodified_levels(self.graph), default=0), detail)
        yield from self.early(chains) if budgets else chains
        if dense:
            yield from _between(self.graph, self.front)
        for budget in budgets:
            for moment in bound.near(self.graph, budget, self.is_over) if thorough else ():
                self.moments.append(moment)
                for lives in () if moment.held is None else _holding(moment, moment.held):
                    yield "whole tensors", lives
            yield from _near(priced, self.front(), budget, self.reserve, self.is_over, thorough)

    def frontier_candidates(self, budgets: Collection[int]) -> list[Candidate]:
        """Plans of the frontier with their exact prices: as many as there is time for, those near the budgets first."""
        front = self.front()
        priced: list[Candidate] = []
        for i in _priced_first(front, budgets):
            if len(priced) >= _PRICED and self.is_over():
                break
            priced.append(_priced(front[i], front[i].predicted, self.machine.overhead))
        return _pareto(priced, self.objective)


@collector_paused()
def solve(
    graph: Graph,
    machine: Machine | None = None,
    *,
    objective: Objective = "throughput",
    limit_seconds: float = 30.0,
    search_seconds: float = math.inf,
    dense: bool = False,
    budgets: Collection[int] = (),
    keep_nbytes: int | None = None,
    thorough: bool = False,
    start: Iterable[Named] = (),
    say: Progress = lambda _: None,
    detail: Progress = lambda _: None,
    beside: Callable[[tuple[Life, ...]], int] = lambda _: 0,
    clock: Callable[[], float] = thread_time,
) -> Frontier:
    """The frontier of a graph. If time runs out, it has the plans found so far, always including keep-all.

    limit_seconds: the time limit.
    search_seconds: the part of the time limit that may be spent on faster plans after plans for few bytes are known.
    dense: whether to add plans between neighbours that are far apart.
    budgets: bytes for which a local search looks for plans.
    keep_nbytes: a budget that must be kept. Until a plan keeps it, the search for plans for few bytes goes on, even when time
        is up.
    thorough: whether the search takes several times as long. It then finds faster plans, or plans where none fitted before, and
        the bound is proven at many points.
    start: plans that are known already.
    beside: a function that gives the bytes that a plan needs in other steps or calls at the same time.
    clock: measures the time limit. By default it is the CPU time of this thread: by wall time, a busy machine would get other
        plans, and could keep fewer budgets.
    say: is told if the time limit was reached.
    detail: is told how the solvers progress.
    """
    began = perf_counter()
    search = _Search(graph, machine or Machine(), objective, beside, clock, limit_seconds)
    machine = search.machine

    def above() -> bool:
        return keep_nbytes is not None and search.fewest().least_budget_nbytes > keep_nbytes

    in_time = search.add(itertools.chain(_plain(graph), start), say, detail, above)
    step = held_at_boundaries(graph)
    saves = any(s.unpacked_at and s.tensor in graph.producers for s in graph.saves)
    if saves:
        in_time = in_time and search.add(_smallest(step), say, detail, above)
    smallest = search.fewest()
    if in_time and saves:
        search.for_faster_plans(search_seconds)
        search.add(search.faster(step, budgets, dense, thorough, detail), say, detail)
    candidates = search.frontier_candidates(budgets)
    others: list[Candidate] = []
    if machine.update_seconds and graph.updates and budgets and (left_seconds := search.left_seconds()) > 0:
        usual = solve(
            updated(graph, ()),
            machine,
            objective=objective,
            limit_seconds=left_seconds,
            search_seconds=search_seconds,
            budgets=budgets,
            clock=clock,
        )
        others = [_priced(c, simulate(graph, c.lives).predicted, machine.overhead) for c in usual.candidates]
    return Frontier(
        graph=graph,
        candidates=tuple(candidates),
        smallest_nbytes=smallest.least_budget_nbytes,
        unmodified_peak_nbytes=max(unmodified_levels(machine.usual_step(graph)), default=0),
        moments=tuple(search.moments),
        seconds=perf_counter() - began,
        machine=machine,
        smallest=smallest if search.reserve is not None else None,
        others=tuple(others),
        cut_off=not in_time,
    )
