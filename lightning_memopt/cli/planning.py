"""`memopt plan`: plan a user's training, or the recorded step of a plan file, for a budget."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memopt import jsonio
from lightning_memopt.bench import user_code
from lightning_memopt.cli.arguments import nbytes_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.units import format_nbytes, parse_budget

if TYPE_CHECKING:
    from lightning_memopt.config import MemOptConfig
    from lightning_memopt.graph import Graph


def _observed(spec: str) -> Graph:
    """Observe a step of a user's training. Raises ConfigError if there is no step to observe."""
    from lightning_memopt.integrations.plain import optimize

    with user_code.in_user_code(f"{spec}()"):
        training = user_code.builder(spec)()
    if any(p.is_meta for p in training.model.parameters()):
        raise ConfigError(f"{spec}: the model is on `meta` and cannot take a step. Use `memopt fit {spec}`.")
    with optimize(training.model, training.optimizer, budget="min", profile_steps=2, verbose=False) as run:
        for _ in range(3):
            with user_code.in_user_code(f"the step of {spec}"):
                training.step()
        frontier = run.session.status().frontier
        if frontier is None:
            raise ConfigError(
                f"{spec}: three steps gave no plan. step() must run a forward of the model in training, its backward, and "
                f"optimizer.step(). {run.report()}"
            )
        return frontier.graph


def _offloading(device: str, config: MemOptConfig) -> Any:
    """The `Offloading` that plans parked tensors with the measured rates of this machine's links and codecs."""
    import torch

    from lightning_memopt.device.places import is_here
    from lightning_memopt.session.parking.offloading import Offloading

    if not is_here(torch.device(device)):
        raise ConfigError(
            f"the step was recorded on a {device.upper()} device, and this machine has none on which to measure links. Plan "
            "it on a machine that has one, or leave --offload and --compress out."
        )
    offloading = Offloading(torch.device(device), config)
    offloading.check(lambda line: print(line, file=sys.stderr))
    return offloading


def _plan_budget(budget: str, device_nbytes: str | None) -> int | None:
    """The bytes of a budget; None for the smallest plan."""
    if budget.strip().lower() == "min":
        return None
    if device_nbytes is None:
        return nbytes_of("--budget", budget, "--device-nbytes")
    return parse_budget(budget, nbytes_of("--device-nbytes", device_nbytes))


def run(args: argparse.Namespace) -> int:
    from lightning_memopt.plan import read_plan, tiers_text, write_plan
    from lightning_memopt.solvers import planner

    from_file, output = Path(args.source).is_file(), args.output or "plan.json"
    if from_file and args.output is None and Path(output).resolve() == Path(args.source).resolve():
        raise ConfigError(f"{output} is the plan file to plan again. Give -o another path.")
    jsonio.check_target(output)  # everything that may be refused is checked before anything runs
    wanted = _plan_budget(args.budget, args.device_nbytes)
    config = None
    budgets = args.host_budget, args.disk_budget
    if (args.offload, args.compress, *budgets) != ("none", "none", None, None):
        from lightning_memopt.config import MemOptConfig

        names = "offload", "host_budget", "disk_budget", "compress", "objective", "solver_seconds"
        config = MemOptConfig(**{name: getattr(args, name) for name in names})
    graph = read_plan(args.source)[1] if from_file else _observed(args.source)
    offloading = None if config is None else _offloading(graph.device, config)
    frontier = planner.solve(
        graph,
        objective=args.objective,
        limit_seconds=args.solver_seconds,
        budgets=() if wanted is None else (wanted,),
        keep_nbytes=wanted,
        thorough=True,
        say=lambda s: print(s, file=sys.stderr),
    )
    if offloading is not None:
        frontier = offloading.widened(frontier)
    budget = frontier.smallest_nbytes if wanted is None else wanted
    plan = frontier.plan(budget)
    write_plan(output, plan, graph)
    print(
        f"{output}: predicted peak {format_nbytes(plan.predicted.needed_nbytes)} of {format_nbytes(budget)}, "
        f"unmodified {format_nbytes(plan.unmodified_peak_nbytes)}, {1e3 * plan.predicted.seconds:.1f} ms extra a step "
        f"(lower bound {1e3 * plan.lower_bound_seconds:.1f} ms), by {plan.solver}"
        f"{f'; {tiers_text(plan)}' if plan.in_tiers else ''}"
    )
    return 0
