"""How many bytes another order of the ops of a step could save at most, and how many of these early updates save."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_memopt.graph import Graph
from lightning_memopt.solvers.ordering.problem import BEFORE, Problem
from lightning_memopt.solvers.ordering.solve import order
from lightning_memopt.solvers.ordering.steps import step_of


@dataclass(frozen=True)
class Savings:
    """Bytes at the peak of an unmodified step, if each buffer is freed after the last op that uses it.

    given_nbytes: in the order in which the ops ran.
    early_nbytes: in that order, with updates as early as possible.
    best_nbytes: in the best order that was reached.
    bound_nbytes: no order needs fewer.
    apart_nbytes: in the given order, if each gradient were freed once it is complete. Early updates of single parameters come
        near this even if the step updates all parameters in one op, which needs all gradients in any order.
    """

    given_nbytes: int
    early_nbytes: int
    best_nbytes: int
    bound_nbytes: int
    apart_nbytes: int

    @property
    def most_nbytes(self) -> int:
        """The most bytes that any order can save."""
        return self.given_nbytes - self.bound_nbytes


def savings(graph: Graph, seconds: float = 1.0) -> Savings | None:
    """How much another order of this step could save at most; None for a graph without ops.

    seconds: the time limit. If it is too short, the bound is looser.
    """
    if not graph.ops:
        return None
    problem = step_of(graph).problem
    result = order(problem, seconds)
    apart = _without_updates(problem).peak_nbytes(range(len(problem)))
    return Savings(result.given_nbytes, result.early_nbytes, result.peak_nbytes, result.bound_nbytes, apart)


def _without_updates(problem: Problem) -> Problem:
    """The problem in which updates do not need gradients and make nothing. They still run."""
    updates = problem.updates
    made_before = [maker not in updates for maker in problem.makers]
    return replace(
        problem,
        users=tuple(
            tuple(u for u in users if u not in updates) if maker != BEFORE and before else users
            for maker, users, before in zip(problem.makers, problem.users, made_before, strict=True)
        ),
        nbytes=tuple(n if before else 0 for n, before in zip(problem.nbytes, made_before, strict=True)),
        workspace=tuple(0 if op in updates else n for op, n in enumerate(problem.workspace)),
    )
