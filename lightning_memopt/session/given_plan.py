"""Read a plan that the user gave as a file, and refuse one that does not fit the run; write such a file."""

from __future__ import annotations

import torch

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.places import same_type
from lightning_memopt.errors import ConfigError, InfeasibleError, PlanMismatchError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan, read_plan, snapshot, write_plan
from lightning_memopt.plan.forms import LOSSLESS, codec_of
from lightning_memopt.plan.tiers import tier_budget
from lightning_memopt.runtime.tiers.room import total_nbytes
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.status import RunStatus

Given = tuple[Plan, Graph]


def read_given(device: torch.device, budget_nbytes: int | None, config: MemOptConfig) -> tuple[Given | None, Foreseen | None]:
    """The plan of the file that the config names, and its graph: either one that is in force from the first step, or one whose
    step has not run before. (None, None) where it names none.

    Raises PlanMismatchError for another device, InfeasibleError for a peak above the budget or more in a tier than its budget,
    and ConfigError for a lossy codec or a rebuild that the config does not allow.
    """
    path = config.plan
    if path is None:
        return None, None
    plan, graph = read_plan(path)
    if not same_type(device, graph.device):
        raise PlanMismatchError(
            f"The plan {path} was made for {graph.device}, the model is on {device.type}. Make a plan there."
        )
    if (
        graph.computed
        and budget_nbytes is not None
        and config.budget != "auto"
        and plan.predicted.needed_nbytes > budget_nbytes
    ):
        raise InfeasibleError(
            f"The plan {path} peaks at {plan.predicted.needed_nbytes} bytes, above the budget of {budget_nbytes}. Give it that "
            "budget, or leave plan= out.",
            smallest_nbytes=plan.predicted.needed_nbytes,
            budget_nbytes=budget_nbytes,
        )
    lossy = {codec_of(life.form) for life in plan.lives if life.how == "fetch"} - LOSSLESS
    if lossy and config.compress in ("none", "lossless"):
        raise ConfigError(
            f"The plan {path} keeps tensors encoded with errors ({', '.join(sorted(lossy))}), and compress is "
            f"{config.compress!r}. Set compress='lossy' to allow it, or leave plan= out."
        )
    if not config.recompute and any(life.how == "rebuild" for life in plan.lives):
        raise ConfigError(
            f"The plan {path} runs {plan.predicted.rebuilt_ops} ops a second time, and recompute=False allows none. Set "
            "recompute=True, or leave plan= out."
        )
    for tier, nbytes in plan.in_tiers.items():
        most = config.tier_budget_nbytes(tier, total_nbytes(tier, config.offload_to[1]))
        if graph.computed and most is not None and nbytes > most:
            raise InfeasibleError(
                f"The plan {path} takes {nbytes} bytes in the {tier} tier, above {tier}_budget={config.budget_of(tier)!r}. Set "
                f"{tier_budget((tier, nbytes))}, or leave plan= out.",
                tiers={tier: nbytes},
            )
    return ((plan, graph), None) if graph.computed else (None, Foreseen(path, plan, graph))


def write_status(path: str, status: RunStatus) -> None:
    """Write the plan of a status, with its graph, as JSON. Raises ConfigError where it has none."""
    plan, graph = _planned(status)
    write_plan(path, plan, graph)


def write_snapshot(path: str, status: RunStatus) -> None:
    """Write the step of a status as a memory snapshot. Raises ConfigError where it has no plan."""
    plan, graph = _planned(status)
    snapshot.dump(graph, plan, path)


def _planned(status: RunStatus) -> tuple[Plan, Graph]:
    if status.plan is None or status.graph is None:
        raise ConfigError("There is no plan yet: it is made after the observed steps. Run them first.")
    return status.plan, status.graph
