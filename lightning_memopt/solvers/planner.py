"""The frontier of plans of a graph, and the one that fits a budget.

All solvers' plans go into one pool, priced by the same simulator: keep-all, checkpointing of each sharded unit, the op-level
minimum cuts of the whole graph, Echo, and the chain programme at many levels of memory. Where the budget is known, a local
search adds plans for it. Only the Pareto set is kept; so the frontier is monotone by construction: a smaller budget never
yields a larger peak, a larger one never a slower plan.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_memopt.clocks import perf_counter, thread_time
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import LATE_HOOK, Graph, Op, fingerprint, resident_nbytes, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, Plan, Prediction, reserved_nbytes_of, simulate
from lightning_memopt.plan.model import Objective
from lightning_memopt.solvers import chain as dp
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.overhead import FREE, Overhead
from lightning_memopt.solvers.recompute import bound, local_search, stage_chain
from lightning_memopt.solvers.recompute.baselines import per_unit
from lightning_memopt.solvers.recompute.between import mixed, moments_between
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.recompute.stages import COARSE, FINE, cut, given_tensors
from lightning_memopt.solvers.recompute.windows import fenced
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.units import ceil_div, format_nbytes

_LEVELS = 160
"""So many levels of the chain programme enter the pool."""

_HORIZONS = (0.3, 0.1)
"""A single-level plan keeps rebuilt tensors for these shares of backward; another variant keeps them until its end."""

_GAP = 0.02
"""Neighbours on the frontier that are further apart, as a share of the bytes of the larger one, get plans between them."""
_GAPS, _PARTS = 48, 4
"""The most gaps that are filled, and in how many parts one is cut."""

UNSEEN_NBYTES = 4096
"""Bytes left free in every budget, for scalars that no op makes (a loss read by Python, a counter)."""

_EARLY = 0.75
"""Of the time limit, the rest is for searches near the budgets, which take few seconds and find the best plans."""

_TIE = 1e-3
_OP_SECONDS, _BYTES_PER_SECOND, _FLOPS_PER_SECOND = 1e-6, 1e9, 8e9
"""An assumed machine, for plans that must not depend on measured times. Only the ratios matter: those of a core of a CPU."""

Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan of the pool.

    lives: its lives.
    predicted: their price.
    solver: name of the solver that made it.
    beside_nbytes: bytes that a budget must have beside the prediction: `_late_nbytes`, and those that `solve` was told of.
    """

    lives: tuple[Life, ...]
    predicted: Prediction
    solver: str
    beside_nbytes: int = 0


def _late_nbytes(graph: Graph) -> int:
    """Bytes left free in a budget on the CPU for the buffers of one collective, where they may be freed after the hook that ran
    the collective.
    """
    hooks = (op.workspace_nbytes for op in graph.ops if op.name == LATE_HOOK)
    return max(hooks, default=0) if graph.device == "cpu" else 0


def _needs(candidate: Candidate) -> int:
    """The smallest budget for a plan; one that rebuilds nothing needs no room for what is unseen."""
    unseen = UNSEEN_NBYTES if candidate.predicted.rebuilt_ops else 0
    return candidate.predicted.needed_nbytes + candidate.beside_nbytes + unseen


def _with_reserved(candidate: Candidate, reserve: Callable[[tuple[Life, ...]], int] | None) -> Candidate:
    if reserve is None:
        return candidate
    return replace(candidate, predicted=replace(candidate.predicted, reserved_nbytes=reserve(candidate.lives)))


@dataclass(frozen=True, eq=False)
class Frontier:
    """The Pareto set of plans of a graph.

    graph: the observed graph.
    candidates: the plans, needed bytes rising and the objective falling; the last one is the unmodified step or better.
    smallest_nbytes: the smallest budget that holds for any op times; for the times of this graph a little less may do.
    unmodified_peak_nbytes: the peak without a plan.
    moments: points of the step that prove lower bounds.
    seconds: how long solving took.
    reserve: lives of a plan -> bytes that the device's allocator reserves, which the budget is then compared with; None where
        the device has no such allocator.
    smallest: a plan that reserves at most `smallest_nbytes`; None without `reserve`.
    """

    graph: Graph
    candidates: tuple[Candidate, ...]
    smallest_nbytes: int
    unmodified_peak_nbytes: int
    moments: tuple[bound.Moment, ...]
    seconds: float
    reserve: Callable[[tuple[Life, ...]], int] | None = None
    smallest: Candidate | None = None

    @cached_property
    def _reserving(self) -> dict[int, Candidate]:
        """Candidates by position, with their reserved bytes, as far as they were asked for."""
        return {}

    def _reserves(self, i: int) -> Candidate:
        candidate = self._reserving.get(i)
        if candidate is None:
            candidate = self._reserving[i] = _with_reserved(self.candidates[i], self.reserve)
        return candidate

    def _best(self, budget_nbytes: int) -> Candidate | None:
        """The last candidate within the budget. Reserved bytes follow allocated ones closely but not strictly: where the last
        one reserves too much, the next one looked at needs less by as much; then those in between, by halves.
        """
        needs = [_needs(c) for c in self.candidates]
        i = above = bisect_right(needs, budget_nbytes)
        while i:
            excess = _needs(self._reserves(i - 1)) - budget_nbytes
            if excess <= 0:
                break
            above, i = i - 1, min(i - 1, bisect_right(needs, needs[i - 1] - excess))
        if not i:
            last = self.smallest
            return last if last is not None and _needs(last) <= budget_nbytes else None
        while above - i > 0:
            middle = (i + 1 + above) // 2
            if _needs(self._reserves(middle - 1)) <= budget_nbytes:
                i = middle
            else:
                above = middle - 1
        return self._reserves(i - 1)

    def within(self, budget_nbytes: int) -> Candidate:
        """The best plan whose predicted peak is within the budget. Raises InfeasibleError naming the smallest budget."""
        best = self._best(budget_nbytes)
        if best is None:
            raise InfeasibleError(
                f"No plan of this model fits {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}): the smallest one peaks at "
                f"{self.smallest_nbytes} bytes ({format_nbytes(self.smallest_nbytes)}), of which "
                f"{format_nbytes(resident_nbytes(self.graph))} are parameters, optimizer state and the batch. "
                f"Set budget={self.smallest_nbytes} or more, or make the batch smaller.",
                smallest_nbytes=self.smallest_nbytes,
                budget_nbytes=budget_nbytes,
            )
        return best

    def bound_seconds(self, budget_nbytes: int) -> float:
        """No recomputation plan within the budget takes fewer extra seconds (`bound`)."""
        return max((moment.bound_seconds(budget_nbytes) for moment in self.moments), default=0.0)

    def plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget, with its bound."""
        best = self.within(budget_nbytes)
        return Plan(
            fingerprint=fingerprint(self.graph),
            lives=best.lives,
            solver=best.solver,
            budget_nbytes=budget_nbytes,
            predicted=best.predicted,
            unmodified_peak_nbytes=self.unmodified_peak_nbytes,
            step_seconds=self.graph.step_seconds,
            solve_seconds=self.seconds,
            lower_bound_seconds=self.bound_seconds(budget_nbytes),
        )


def _plain(graph: Graph) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """What a step does without a solver: nothing, and checkpointing of each unit of sharded modules."""
    yield "keep all", keep_all(graph)
    if graph.windowed:
        yield "each unit checkpointed", per_unit(graph)


def _whole_graph(moment: bound.Moment) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """Single-level plans: hold the tensors of a cut and those that cost nothing at its point, rebuild the rest just in time."""
    problem, graph = moment.problem, moment.problem.graph
    requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
    spare = {t for _, t in requests}.difference(problem.needed).union(filter(problem.given, graph.producers))
    lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}
    always = unrepeatable(graph)
    for vertex in moment.hull.vertices:
        for horizon in (None, *(int(share * (requests[-1][0] - requests[0][0])) for share in _HORIZONS)):
            roll = Rollout(graph)
            roll.serve(requests, (spare | vertex.held) - lost | always, horizon)
            yield f"minimum cut, {format_nbytes(vertex.nbytes)} held", roll.lives()


def _chains(graph: Graph) -> list[tuple[str, stage_chain.ModelChain]]:
    """The graph as chains of coarse and of fine stages, with and without ambient tensors."""
    seen: set[tuple[int, ...]] = set()
    models = []
    for span, share in itertools.product((0.2, 2.0), (COARSE, FINE)):
        stages = cut(graph, given=given_tensors(graph, span), share=share)
        key = tuple(s.first for s in stages.spans)
        if key not in seen and len(stages.spans) > 1:
            seen.add(key)
            with contextlib.suppress(LoweringError):  # a stage that is asked for in windows of several units
                models.append((f"chain of {len(stages.spans)} stages", stage_chain.build(stages)))
    return models


def _chain(graph: Graph, limit: int, say: Progress) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """Chain plans at many levels."""
    for name, model in _chains(graph):
        table = dp.solve_chain(model.chain, limit)
        levels = table.levels()
        say(f"{name}, {len(levels)} levels")
        step = max(1, ceil_div(len(levels), _LEVELS))
        for level in sorted({*levels[::step], *levels[:8]}):
            yield name, stage_chain.lives(model, table.tree(level))


def _smallest(graph: Graph) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """Plans for few bytes that depend on no measured time: ops take the seconds that their bytes and FLOPs give."""

    def seconds(op: Op) -> float:
        nbytes = sum(graph.tensors[t].nbytes for t in {*op.inputs, *op.outputs})
        return _OP_SECONDS + nbytes / _BYTES_PER_SECOND + op.flops / _FLOPS_PER_SECOND

    timeless = replace(graph, ops=tuple(replace(op, seconds=seconds(op)) for op in graph.ops))
    plans = [("Echo", echo(timeless))]
    for moment in bound.moments(timeless, vertices=6):
        plans += _whole_graph(moment)
    for name, model in _chains(timeless):
        plans.append((f"{name}, smallest", stage_chain.lives(model, dp.smallest_tree(model.chain))))
    yield from plans
    smaller = local_search.smaller(timeless, [lives for _, lives in plans])
    if smaller is not None:
        yield "local search, smallest", smaller


def smallest(graph: Graph) -> Candidate:
    """A plan for few bytes, with nothing else solved: it tells quickly whether a budget can be kept at all."""
    saves = any(s.tensor in graph.producers for s in graph.saves)
    plans = itertools.chain(_plain(graph), _smallest(fenced(graph)) if saves else ())
    pool, late = [], _late_nbytes(graph)
    for solver, lives in plans:
        with contextlib.suppress(LoweringError):
            pool.append(Candidate(lives, simulate(graph, lives).predicted, solver, late))
    return _with_reserved(min(pool, key=_needs), reserved_nbytes_of(graph))


def smallest_nbytes(graph: Graph) -> int:
    """`Frontier.smallest_nbytes`, with nothing else solved."""
    return _needs(smallest(graph))


def _priced_by_flops(graph: Graph) -> Graph:
    """The graph with seconds in proportion to FLOPs; a small share of the measured time decides between equals."""
    rate = graph.step_seconds / max(1, sum(op.flops for op in graph.ops))
    return replace(graph, ops=tuple(replace(op, seconds=op.flops * rate + op.seconds * _TIE) for op in graph.ops))


def _pareto(pool: Iterable[Candidate], objective: Objective, rebuilt_op_seconds: float = 0.0) -> list[Candidate]:
    """Peaks rising, the objective falling. `rebuilt_op_seconds`: what each op that runs again takes beside its own seconds."""

    def price(c: Candidate) -> tuple[float, ...]:
        p = c.predicted
        seconds = p.seconds + rebuilt_op_seconds * p.rebuilt_ops
        return (seconds,) if objective == "throughput" else (p.extra_flops, seconds)

    best: list[Candidate] = []
    for c in sorted(pool, key=lambda c: (_needs(c), *price(c), c.predicted.rebuilt_ops)):
        if not best or price(c) < price(best[-1]):
            best.append(c)
    return best


def _between(graph: Graph, front: Callable[[], list[Candidate]]) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """Plans between neighbours of the frontier that are far apart, the widest gap first. `front`: the frontier by now."""
    filled: set[tuple[int, int]] = set()
    for _ in range(_GAPS):
        pairs = itertools.pairwise(front())
        gaps = [
            (_needs(large) - _needs(small), small, large)
            for small, large in pairs
            if _needs(large) - _needs(small) > _GAP * _needs(large) and (id(small), id(large)) not in filled
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
    graph: Graph, front: list[Candidate], budget_nbytes: int, reserve: Callable[[tuple[Life, ...]], int] | None
) -> Iterator[tuple[str, tuple[Life, ...]]]:
    """Plans for a budget that a local search reaches from those of the frontier."""
    fitting = bisect_right([_needs(c) for c in front], budget_nbytes)
    if fitting < len(front):  # the unmodified step does not fit
        near = _with_reserved(front[max(0, fitting - 1)], reserve)
        beside = near.predicted.needed_nbytes - near.predicted.peak_nbytes + near.beside_nbytes + UNSEEN_NBYTES
        for lives in local_search.within(graph, [c.lives for c in front], fitting, budget_nbytes - beside):
            yield "local search", lives


@collector_paused()
def solve(
    graph: Graph,
    *,
    objective: Objective = "throughput",
    limit_seconds: float = 30.0,
    dense: bool = False,
    budgets: Collection[int] = (),
    say: Progress = lambda _: None,
    overhead: Overhead = FREE,
    beside: Callable[[tuple[Life, ...]], int] = lambda _: 0,
    clock: Callable[[], float] = thread_time,
) -> Frontier:
    """The frontier of a graph. Past the time limit it is made of the plans found so far, keep-all among them.

    `dense`: with plans between neighbours that are far apart. `budgets`: bytes for which a local search looks for plans.
    `overhead`: seconds that recording and rebuilding take by themselves. `beside`: bytes that a plan
    needs in other steps or calls at the same time. `clock`: what the limit is counted by: this thread's seconds of CPU, for a
    busy machine would have other plans, and could keep fewer budgets.
    """
    began, began_clock = perf_counter(), clock()
    unmodified = max(unmodified_levels(graph), default=0)
    pool: list[Candidate] = []
    known: set[tuple[Life, ...]] = set()
    late = _late_nbytes(graph)
    moments: list[bound.Moment] = []

    def fill(plans: Iterable[tuple[str, tuple[Life, ...]]]) -> bool:
        """Price plans into the pool; whether there was time for all."""
        for solver, lives in plans:
            try:
                if lives not in known:  # solvers agree on a third of the plans; the first one has made it
                    known.add(lives)
                    pool.append(Candidate(lives, simulate(graph, lives).predicted, solver, late + beside(lives)))
            except LoweringError:
                if not graph.windowed:  # a chain that crosses units asks for weights that are away
                    say(f"a plan of {solver} asks for what cannot be made; left out")
            if clock() - began_clock > limit_seconds:
                say(f"time limit of {limit_seconds:g} s reached with {len(pool)} plans")
                return False
        return True

    def front() -> list[Candidate]:
        return _pareto(pool, objective, overhead.rebuilt_op)

    def early(plans: Iterator[tuple[str, tuple[Life, ...]]]) -> Iterator[tuple[str, tuple[Life, ...]]]:
        while clock() - began_clock < _EARLY * limit_seconds and (plan := next(plans, None)) is not None:
            yield plan

    def timed() -> Iterator[tuple[str, tuple[Life, ...]]]:
        priced = overhead.added_to(searched) if objective == "throughput" else _priced_by_flops(searched)
        yield "Echo", echo(priced)
        moments.extend(bound.moments(graph))  # of all plans, those among them that solvers do not find
        for moment in moments if priced is graph else bound.moments(priced):
            yield from _whole_graph(moment)
        chains = _chain(priced, unmodified, say)
        yield from early(chains) if budgets else chains
        if dense:
            yield from _between(graph, front)
        for budget in budgets:
            yield from _near(priced, front(), budget, reserve)

    saves = any(s.unpacked_at and s.tensor in graph.producers for s in graph.saves)
    searched = fenced(graph)
    in_time = fill(_plain(graph)) and saves and fill(_smallest(searched))
    reserve = reserved_nbytes_of(graph)
    smallest = _with_reserved(min(pool, key=_needs), reserve)
    if in_time:
        fill(timed())
    priced = [replace(c, predicted=replace(c.predicted, overhead_seconds=overhead.of(c.lives))) for c in front()]
    return Frontier(
        graph=graph,
        candidates=tuple(_pareto(priced, objective)),
        smallest_nbytes=_needs(smallest),
        unmodified_peak_nbytes=unmodified,
        moments=tuple(moments),
        seconds=perf_counter() - began,
        reserve=reserve,
        smallest=smallest if reserve is not None else None,
    )
