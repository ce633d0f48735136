"""Solve for an observed step, and choose its plan (`plan_for`); say what was chosen (`tell`). `say` tells the user a line: a
solve only says how far it has come, because several may be made before one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from lightning_memopt import logs
from lightning_memopt.clocks import thread_time
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.determinism import is_tuned
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import COMPILED, Graph
from lightning_memopt.logs import Say
from lightning_memopt.plan import Machine, Plan, StateParking, WeightParking, states_text, tiers_text, weights_text
from lightning_memopt.plan.tiers import tier_budgets_text
from lightning_memopt.session import times
from lightning_memopt.session.measure.peak_meter import spoil_open_meters
from lightning_memopt.session.observe import costs
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.advice import advice
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.worth import most_extra_seconds, worth
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes


class Solved(NamedTuple):
    """What was solved for an observed step.

    frontier: all plans that were made.
    plan: the one to put in force.
    above: a warning's text, where no plan is within the limit and the plan is the smallest; else None.
    tiers: budgets of tiers with which a plan would be.
    """

    frontier: planner.Frontier
    plan: Plan
    above: str | None
    tiers: Mapping[str, int] = MappingProxyType({})


def plan_for(
    graph: Graph,
    limit_nbytes: int | None,
    offloading: Offloading,
    say: Say,
    machine: Machine,
    foreseen: Foreseen | None = None,
) -> Solved:
    """Solve for a graph on a machine, and choose its plan. Raises InfeasibleError as `chosen` does. `foreseen`: the plan that
    the user made before there was such a machine. Nothing is searched where it serves this step as it is.
    """
    known = None if foreseen is None else foreseen.take(graph)
    frontier = None
    if known is not None:
        priced = lambda: replace(machine, overhead=costs.overhead(graph, offloading.device))  # noqa: E731
        frontier = known.frontier(limit_nbytes, priced, say)
    if frontier is None:
        frontier = frontier_of(graph, offloading, say, machine, limit_nbytes, () if known is None else known.plans)
    return chosen(frontier, graph, limit_nbytes, offloading.config)


def frontier_of(
    graph: Graph,
    offloading: Offloading,
    say: Say,
    machine: Machine,
    limit_nbytes: int | None = None,
    start: Iterable[planner.Named] = (),
) -> planner.Frontier:
    """The frontier of this graph, with parked tensors where the config allows them, and with more plans for one limit.
    `start`: plans that are known already.
    """
    say(f"MemOpt: solving for {len(graph.ops)} ops, {len(graph.saves)} saved tensors")
    spoil_open_meters()
    return offloading.widened(
        planner.solve(
            graph,
            replace(machine, overhead=costs.overhead(graph, offloading.device)),
            objective=offloading.config.objective,
            limit_seconds=offloading.config.solver_seconds,
            search_seconds=worth(graph, offloading.config),
            budgets=() if limit_nbytes is None else (limit_nbytes,),
            keep_nbytes=limit_nbytes,
            start=start,
            say=lambda line: say(f"MemOpt:   {line}"),
            detail=_detail if offloading.config.verbose else logs.silent,
            clock=times.current.solver_clock(thread_time),
        )
    )


def budget_for(needed_nbytes: int, config: MemOptConfig) -> str:
    """The budget that a user has to set for a plan that needs these bytes, as every message names it."""
    budget_nbytes = needed_nbytes + config.headroom
    return f"budget={budget_nbytes} or more ({format_nbytes(budget_nbytes)})"


def _detail(text: str) -> None:
    logs.detail(f"MemOpt:   {text}")


def _tuned_nbytes(graph: Graph) -> int:
    """Bytes of saved tensors that a convolution made and that do not run again, because cuDNN chooses by time."""
    made = {t for op in graph.forward if is_tuned(op.name, graph.device) for t in op.outputs}
    return sum(graph.tensors[t].nbytes for t in made & {save.tensor for save in graph.saves})


def chosen(frontier: planner.Frontier, graph: Graph, limit_nbytes: int | None, config: MemOptConfig) -> Solved:
    """Of a frontier, the plan for `limit_nbytes` (None: the smallest that `max_slowdown` allows). Where no plan fits: the
    smallest one, a warning's text, and budgets of tiers with which one would.

    Raises InfeasibleError where no plan fits and `on_exceed` is "raise". Otherwise training goes on, because parameters have
    been updated already.
    """
    if limit_nbytes is None:
        return Solved(frontier, frontier.smallest_plan(most_extra_seconds(graph, config)), None)
    try:
        return Solved(frontier, frontier.plan(limit_nbytes), None)
    except InfeasibleError as error:
        if config.on_exceed == "raise" or error.smallest_nbytes is None:
            raise
        smallest_nbytes, tiers = error.smallest_nbytes, error.tiers  # not the error, whose frames would hold the batch
    plan = frontier.plan(smallest_nbytes)
    above = (
        f"the budget is not kept: no plan of this step fits {limit_nbytes} bytes. The smallest one is in force. Set "
        f"{budget_for(plan.budget_nbytes, config)}{tier_budgets_text(tiers)}. {advice(graph, plan.lives, config)}"
    )
    return Solved(frontier, plan, above, tiers)


def tell(solved: Solved, limit_nbytes: int | None, offloading: Offloading, say: Say) -> None:
    """Tell the user which plan is in force, what it does, and why there is none that does better."""
    frontier, plan, above, _ = solved
    config, graph = offloading.config, frontier.graph
    whole = frontier.whole or graph  # the step with nothing parked
    before = "as compiled" if any(op.name == COMPILED for op in graph.ops) else "unmodified"
    unmodified_nbytes = unmodified_peak(frontier.machine.usual_step(whole), frontier.machine)
    say(
        f"MemOpt: plan in force: predicted peak {format_nbytes(plan.predicted.needed_nbytes)} of "
        f"{format_nbytes(plan.budget_nbytes)}, {before} {format_nbytes(unmodified_nbytes)}; extra "
        f"{1e3 * plan.predicted.seconds:.1f} ms a step, no plan below {1e3 * plan.lower_bound_seconds:.1f} ms; "
        f"solved in {frontier.seconds:.1f} s{f'; {tiers_text(plan)}' if plan.in_tiers else ''}"
    )
    if config.verbose:
        _detail(f"the plan is by {plan.solver}")
    if len(plan.updates) < len(graph.updates):
        say(
            f"MemOpt: {len(plan.updates)} of {len(graph.updates)} parameters are updated in backward: the budget needs no "
            "more, and updates of single parameters take longer"
        )
    if plan.states:
        say(f"MemOpt: parked between updates: {states_text(plan.states)}; {_copies_text(plan.states)}")
    if plan.weights:
        say(f"MemOpt: on the device only while their module runs: {weights_text(plan.weights)}; {_copies_text(plan.weights)}")
    if above is None and limit_nbytes is None and plan.budget_nbytes > frontier.smallest_nbytes:
        say(
            f"MemOpt: smaller plans, down to {format_nbytes(frontier.smallest_nbytes)}, would take more than "
            f"{config.max_slowdown:g} times as long as the unmodified step (max_slowdown)"
        )
    rests = plan.states or plan.weights
    if above is None and frontier.searched and not rests and frontier.smallest_nbytes >= unmodified_nbytes:
        step = "step as it is compiled now" if before == "as compiled" else "unmodified step"
        say(f"MemOpt: no plan is smaller than the {step}. {advice(graph, plan.lives, config)}")
    tuned_nbytes = _tuned_nbytes(graph)
    if tuned_nbytes:
        say(
            f"MemOpt: {format_nbytes(tuned_nbytes)} of results of convolutions are kept, because cuDNN chooses algorithms by "
            "time in each thread; for smaller budgets set torch.backends.cudnn.benchmark = False before the first step"
        )
    rates = offloading.measured
    if rates is not None and offloading.tier and plan.predicted.rebuilt_ops and not plan.parks:
        link = rates.links[offloading.tier]
        out, back = (format_nbytes(int(rate)) for rate in (link.out_bytes_per_second, link.in_bytes_per_second))
        say(
            f"MemOpt: no saved tensor is parked in the {offloading.tier} tier: no plan that parks was found to be faster than "
            f"recomputation alone. Copies were measured: {out} a second out, {back} back"
        )


def _copies_text(each: Sequence[StateParking] | Sequence[WeightParking]) -> str:
    took, waits = 1e3 * sum(one.copy_seconds for one in each), 1e3 * sum(one.seconds for one in each)
    return f"copies take {took:.1f} ms of a step, which waits for {waits:.1f} ms of that"
