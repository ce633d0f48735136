"""One plan for all ranks that have the same graph: the first rank solves for the largest of all, and the others adopt its plan.

Graphs are the same if all ops and tensors, and their sizes, are. Ranks may differ in what else is in memory during a step, in
workspaces and in times. The plan is made for the largest of each. So one rank's plan serves all, and no rank waits for a slower
one because of its plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, fingerprint
from lightning_memopt.logs import Say
from lightning_memopt.plan import Machine
from lightning_memopt.plan.files import fields_of, plan_of_fields
from lightning_memopt.ranks import Ranks
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve import solving
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.solvers.planner import Candidate, Frontier

NOTHING: dict[str, Any] = {"graph": ""}
"""What a rank posts if it makes no plan after all."""
_CANDIDATES = 32
"""Maximum number of plans of a frontier that are sent: later budgets choose among them."""


def plan_of_first_rank(
    ranks: Ranks,
    graph: Graph,
    limit_nbytes: int | None,
    offloading: Offloading,
    say: Say,
    machine: Machine,
    seconds: float,
    foreseen: Foreseen | None = None,
) -> Solved | None:
    """The plan of the first rank; None where the ranks' graphs or options differ, or where a rank did not come in `seconds`.

    Raises InfeasibleError on all ranks where the first rank does.
    """
    config = dataclasses.replace(offloading.config, verbose=True)
    own = {"graph": _structure(graph), "config": repr(config), "smallest": limit_nbytes is None, "limit": limit_nbytes}
    decisions = ranks.meet("the plan", own, seconds)
    if decisions is None or any(_alike(d) != _alike(own) for d in decisions):
        return None
    limits = [d["limit"] for d in decisions]
    limit_nbytes = None if limit_nbytes is None else min(limits)
    if ranks.rank:
        ranks.tell("sizes", _sizes(graph))
        answer = ranks.hear("shared plan", 0, seconds)
        return None if answer is None else _adopted(answer, graph, offloading, machine)
    sizes = [_sizes(graph), *(ranks.hear("sizes", rank, seconds) for rank in range(1, ranks.size))]
    together = largest(graph, [s for s in sizes if s is not None])
    try:
        outcome = solving.plan_for(together, limit_nbytes, offloading, say, machine, foreseen)
    except InfeasibleError as error:
        ranks.tell("shared plan", {"refused": str(error), "smallest": error.smallest_nbytes, "budget": error.budget_nbytes})
        raise
    ranks.tell("shared plan", _answer(outcome, together))
    return outcome


def _alike(decision: dict[str, Any]) -> tuple[Any, ...]:
    return decision["graph"], decision.get("config"), decision.get("smallest")


def _structure(graph: Graph) -> str:
    """A digest of everything in a graph except times, workspaces, and the sizes of tensors that no forward op makes."""
    parts = (
        fingerprint(graph),
        [(op.name, op.phase, op.inputs, op.outputs, op.mutates, op.at) for op in graph.ops],
        [(t.kind, t.storage, t.born_at, t.freed_at) for t in graph.tensors],
        graph.saves,
        graph.points,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _sizes(graph: Graph) -> dict[str, Any]:
    """What may differ between graphs of the same structure: one list for each quantity, by id."""
    return {
        "nbytes": [t.nbytes for t in graph.tensors],
        "workspaces": [op.workspace_nbytes for op in graph.ops],
        "states": [op.state_nbytes for op in graph.ops],
        "seconds": [op.seconds for op in graph.ops],
        "recomputable": [op.recomputable for op in graph.ops],
    }


def largest(graph: Graph, sizes: list[dict[str, Any]]) -> Graph:
    """The graph with the largest bytes and seconds of all `sizes`. An op may run again only if it may on all ranks."""

    def each(key: str, choose: Callable[..., Any]) -> list[Any]:
        return [choose(values) for values in zip(*(s[key] for s in sizes), strict=True)]

    nbytes, workspaces, states = each("nbytes", max), each("workspaces", max), each("states", max)
    seconds, recomputable = each("seconds", max), each("recomputable", all)
    ops = tuple(
        dataclasses.replace(
            op,
            workspace_nbytes=workspaces[op.id],
            state_nbytes=states[op.id],
            seconds=seconds[op.id],
            recomputable=recomputable[op.id],
        )
        for op in graph.ops
    )
    tensors = tuple(dataclasses.replace(t, nbytes=nbytes[t.id]) for t in graph.tensors)
    return dataclasses.replace(graph, ops=ops, tensors=tensors, step_seconds=sum(seconds))


def _answer(outcome: Solved, graph: Graph) -> dict[str, Any]:
    frontier, plan = outcome.frontier, outcome.plan
    last = len(frontier.candidates) - 1
    sent = sorted({i * last // max(1, _CANDIDATES - 1) for i in range(_CANDIDATES)})
    candidates = (frontier.candidates[i] for i in sent)
    return {
        "sizes": _sizes(graph),
        "plan": fields_of(plan),
        "above": outcome.above,
        "seconds": frontier.seconds,
        "searched": frontier.searched,
        "smallest": frontier.smallest_nbytes,
        "unmodified": frontier.unmodified_peak_nbytes,
        "late": frontier.candidates[last].beside_nbytes,
        "candidates": [
            fields_of(dataclasses.replace(plan, lives=c.lives, predicted=c.predicted, solver=c.solver)) for c in candidates
        ],
    }


def _adopted(answer: dict[str, Any], own: Graph, offloading: Offloading, machine: Machine) -> Solved:
    """The first rank's plan and frontier on this rank. The frontier has no bound of its own; the plan has the bound of the
    first rank.
    """
    if "refused" in answer:
        raise InfeasibleError(f"{answer['refused']}", smallest_nbytes=answer["smallest"], budget_nbytes=answer["budget"])
    graph = largest(own, [answer["sizes"]])
    plans = [plan_of_fields(fields, graph) for fields in answer["candidates"]]
    frontier = Frontier(
        graph=graph,
        candidates=tuple(Candidate(plan.lives, plan.predicted, plan.solver, answer["late"]) for plan in plans),
        smallest_nbytes=answer["smallest"],
        unmodified_peak_nbytes=answer["unmodified"],
        moments=(),
        seconds=answer["seconds"],
        machine=machine,
        searched=answer["searched"],
    )
    return Solved(offloading.widened(frontier), plan_of_fields(answer["plan"], graph), answer["above"])
