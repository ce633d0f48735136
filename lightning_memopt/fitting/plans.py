"""The plan that an answer proposes for a card, as a file that a run takes by `plan=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from lightning_memopt import jsonio
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.fitting.found import RECOMPUTE
from lightning_memopt.plan import write_plan
from lightning_memopt.solvers.frontier import Frontier
from lightning_memopt.units import format_nbytes


class OnCard(Protocol):
    """The answer for a card."""

    @property
    def card(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def usable_nbytes(self) -> int: ...
    @property
    def verdict(self) -> str: ...
    @property
    def techniques(self) -> tuple[str, ...]: ...


def check(cards: Sequence[str], path: str, ranks: Sequence[int] = (1,)) -> None:
    """Before anything is recorded: raise ConfigError if a plan for these cards cannot be written, PlanFileError if none can be
    written to this path.
    """
    if len(cards) != 1:
        raise ConfigError(f"a plan is for one card: give it by --card, as --card 24GiB ({len(cards)} are given)")
    if tuple(ranks) != (1,):
        raise ConfigError("a plan is for one card: leave --ranks out")
    jsonio.check_target(path)


def save(found: Frontier, cards: Sequence[OnCard], path: str) -> str:
    """Write the plan for the only card, with the recorded step: see `Fit.save_plan`."""
    check([on.card for on in cards], path, [on.ranks for on in cards])
    (on,) = cards
    if on.verdict == "no":
        raise InfeasibleError(
            f"no plan fits {on.card}: nothing is written. Make the step smaller, or give a card with "
            f"{format_nbytes(found.smallest_nbytes)} or more for tensors.",
            smallest_nbytes=found.smallest_nbytes,
            budget_nbytes=on.usable_nbytes,
        )
    beyond = [name for name in on.techniques if name != RECOMPUTE]
    if beyond:
        raise ConfigError(
            f"the plan for {on.card} uses {' and '.join(beyond)}, and only plans that recompute are written before a step has "
            "run. Give the run these options and the budget, or ask without them."
        )
    graph = replace(found.graph, computed=False)
    plan = found.plan(on.usable_nbytes)
    write_plan(path, plan, graph)
    what = f"runs {plan.predicted.rebuilt_ops} ops again" if plan.predicted.rebuilt_ops else "keeps everything"
    return (
        f"{path}: a plan for {on.card}, which {what}: predicted peak {format_nbytes(plan.predicted.needed_nbytes)} of "
        f"{format_nbytes(on.usable_nbytes)}. Give it to a run by plan={path!r}."
    )
