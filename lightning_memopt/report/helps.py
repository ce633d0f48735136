"""Say what would help a planned step most, from its graph, its plan, and plans for other budgets and techniques.

Input: a plan and its graph. Output: lines of text, ordered by the bytes that they save, largest first. For other techniques,
the bytes are those of the best plan found. Links and codecs are not timed, so no seconds are given for them. Imports torch only
for the forms in which tensors can be parked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import FREE, Life, Machine, Plan, step_of
from lightning_memopt.plan.peak import Breakdown, at_peak
from lightning_memopt.report.blocks import blocks
from lightning_memopt.report.fates import operator, runs_again
from lightning_memopt.solvers import joint, planner
from lightning_memopt.units import format_nbytes

_SCALING = ("feature maps", "logits", "held to rebuild", "rebuilt", "generator states", "in use", "workspace", "inputs")
"""Structures whose bytes grow with the batch."""
_LESS, _MORE = 9, 11
"""Other budgets that are tried, in tenths of the budget."""
_MOST_PLANS = 8
"""Maximum number of plans from which the search for parked tensors starts."""


@dataclass(frozen=True, slots=True)
class Help:
    """nbytes: maximum bytes that it saves; 0 if it saves time, or nothing. text: a sentence."""

    nbytes: int
    text: str


def helps(plan: Plan, graph: Graph, limit_seconds: float = 10.0) -> str:
    """A list of sentences with a title. `limit_seconds`: time limit of the search for plans for other budgets."""
    peak = at_peak(step_of(graph, plan), plan.lives)
    budgets = [_tenths(plan, share) for share in (_LESS, _MORE)]
    frontier = planner.solve(graph, limit_seconds=limit_seconds, budgets=budgets, machine=_searched_with(plan))
    if frontier.cut_off:
        others = ["Other budgets, offload and compression were not tried, because time ran out. Give more --seconds."]
        entries = [*_batch(peak)]
    else:
        others = [*_budget(plan, frontier)]
        entries = [*_parking(graph, plan, frontier), *_batch(peak)]
    ranked = sorted(entries, key=lambda entry: -entry.nbytes)
    lines = [*costliest(graph, plan), *others, *(entry.text for entry in ranked)]
    return "\n".join(["What would help most:", *(f"- {line}" for line in lines)])


def _searched_with(plan: Plan) -> Machine:
    """A machine on which each op that runs again costs what the engine's own work costs per op in this plan."""
    ops = plan.predicted.rebuilt_ops
    return Machine(overhead=replace(FREE, rebuilt_op=plan.predicted.overhead_seconds / ops if ops else 0.0))


def costliest(graph: Graph, plan: Plan) -> Iterator[str]:
    """The block and the operator that take most of the time of ops that run again."""
    total = plan.predicted.extra_seconds
    if total <= 0:
        yield (
            "Nothing runs again: the step costs no extra time."
            if not plan.predicted.stall_seconds
            else (f"No op runs again; the step waits {1e3 * plan.predicted.stall_seconds:.2f} ms for copies.")
        )
        return
    block = max(blocks(graph, plan), key=lambda b: b.extra_seconds)
    seconds: dict[str, float] = {}
    for op_id, times in runs_again(graph, plan).items():
        op = graph.ops[op_id]
        seconds[operator(op.name)] = seconds.get(operator(op.name), 0.0) + times * op.seconds
    name = max(seconds, key=seconds.__getitem__)
    yield (
        f"{block.name} takes most of the extra time: {1e3 * block.extra_seconds:.2f} of {1e3 * total:.2f} ms. By operator, "
        f"{name} does: {1e3 * seconds[name]:.2f} ms."
    )


def _seconds(plan: Plan) -> float:
    """The plan's extra seconds without the measured seconds of the engine, which a plan that never ran does not have."""
    return plan.predicted.seconds - plan.predicted.overhead_seconds


def _tenths(plan: Plan, share: int) -> int:
    """`share` tenths of a plan's budget, in bytes."""
    return plan.budget_nbytes * share // 10


def _budget(plan: Plan, frontier: planner.Frontier) -> Iterator[str]:
    """What 10 % more and 10 % less budget would cost, and the smallest budget, with recomputation alone."""
    if not (plan.predicted.rebuilt_ops or plan.parks):
        yield f"The step fits {format_nbytes(plan.budget_nbytes)} as it is: a larger budget changes nothing."
    else:
        yield _more(plan, frontier)
    less = _tenths(plan, _LESS)
    try:
        seconds = frontier.within(less).predicted.seconds
        yield f"10 % less budget ({format_nbytes(less)}) would cost {1e3 * seconds:.2f} ms a step, with recomputation alone."
    except InfeasibleError:
        yield (
            f"10 % less budget ({format_nbytes(less)}) cannot be kept with recomputation alone: the smallest budget is "
            f"{format_nbytes(frontier.smallest_nbytes)}."
        )


def _more(plan: Plan, frontier: planner.Frontier) -> str:
    more, own = _tenths(plan, _MORE), _seconds(plan)
    text = f"10 % more budget ({format_nbytes(more)})"
    try:
        best = frontier.within(more).predicted
    except InfeasibleError:  # the plan parks, too
        return f"{text} is not enough for recomputation alone, which needs {format_nbytes(frontier.smallest_nbytes)}."
    if not best.rebuilt_ops:
        return f"{text} is enough for the step without a plan, and saves the {1e3 * own:.2f} ms that the plan costs."
    if best.seconds >= own:
        return f"{text} saves no time with recomputation alone: {1e3 * best.seconds:.2f} ms a step, this plan {1e3 * own:.2f}."
    return f"{text} saves {1e3 * (own - best.seconds):.2f} ms a step: {1e3 * best.seconds:.2f} instead of {1e3 * own:.2f}."


def _parking(graph: Graph, plan: Plan, frontier: planner.Frontier) -> Iterator[Help]:
    """The smallest budgets with offload and with lossless compression, if the plan parks nothing yet."""
    if plan.parks:
        return
    try:
        import torch
    except ModuleNotFoundError:
        yield Help(0, "Offload and compression were not tried, because torch is not installed.")
        return
    from lightning_memopt.config import MemOptConfig
    from lightning_memopt.session.parking.joint_frontier import peak_nbytes
    from lightning_memopt.session.parking.offloading import Offloading

    tier = kind_of(graph.device).slow_tier
    starts = _spread([c.lives for c in frontier.candidates])
    for option, value in (("offload", tier), ("compress", "lossless")):
        config = MemOptConfig(**{option: value})  # type: ignore[arg-type]
        forms = Offloading(torch.device(graph.device), config).forms(graph)
        least, lives = joint.least(graph, starts, forms, lambda lives: peak_nbytes(graph, lives))
        saved = frontier.smallest_nbytes - least - planner.UNSEEN_NBYTES
        if saved <= 0 or not any(life.how == "fetch" for life in lives):
            yield Help(0, f"`{option}={value!r}` does not lower the smallest budget.")
            continue
        alone, parked = joint.least(graph, [], forms, lambda lives: peak_nbytes(graph, lives))
        copied = 2 * sum(life.parked_nbytes or graph.tensors[life.tensor].nbytes for life in parked if life.how == "fetch")
        price = f", with at most {format_nbytes(copied)} copied a step" if option == "offload" else ""
        enough = alone + planner.UNSEEN_NBYTES <= plan.budget_nbytes and plan.predicted.rebuilt_ops
        yield Help(
            saved,
            f"`{option}={value!r}` lowers the smallest budget by {format_nbytes(saved)}, from "
            f"{format_nbytes(frontier.smallest_nbytes)} to {format_nbytes(least + planner.UNSEEN_NBYTES)}"
            f"{'. It keeps this budget without rebuilding anything' + price if enough else ''}.",
        )


def _spread(plans: list[tuple[Life, ...]]) -> list[tuple[Life, ...]]:
    """At most `_MOST_PLANS` of the plans, evenly spread, including the first and the last."""
    if len(plans) <= _MOST_PLANS:
        return plans
    return [plans[i * (len(plans) - 1) // (_MOST_PLANS - 1)] for i in range(_MOST_PLANS)]


def _batch(peak: Breakdown) -> Iterator[Help]:
    """What half the batch size would save at the peak of this plan."""
    nbytes = scaling_nbytes(peak) // 2
    if nbytes:
        yield Help(
            nbytes,
            f"Half the batch size saves about {format_nbytes(nbytes)} at this plan's peak: half of what grows with it.",
        )


def scaling_nbytes(peak: Breakdown) -> int:
    """The bytes at a peak that grow with the batch: activations, inputs, and what backward works on, but not updates."""
    return sum(nbytes for (layer, structure), nbytes in peak.nbytes.items() if structure in _SCALING and layer != "update")
