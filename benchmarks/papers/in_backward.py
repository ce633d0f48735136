"""Peak memory with updates in backward against without, beside OLLA's Figure 7 (Steiner et al., 2022, section 5.3).

    python -m benchmarks in_backward [--models gpt2,llama] [--batches 1,32] [-o benchmarks/results/in_backward.json]
    python -m benchmarks in_backward --chosen [--batches 1]  # which updates plans choose, against all that may be early

Four real steps run in either way within `optimize`, once with a budget that needs no plan and once at the smallest plan; a
planned one is measured by the allocator's own events. Where the routing of experts takes the forward off its plan (what does
not match is kept), steps go on until a plan was followed; `left_plan` says that none was. Per row: bytes measured (all of the
step: parameters, state, batch included, but not what the process held before), predicted, and whether all parameters are those
of the unmodified loop, to the bit.
`reduction`: of the peak, in percent, as OLLA reports it: 22.5 at batch size 1 and 10.1 at 32 on average, at most 38, of
forward and backward with PyTorch's order as the baseline (their networks: AlexNet to XLM-R, at full width). Bytes only, no
timings.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, built
from lightning_memopt import optimize
from lightning_memopt.session import RunStatus
from lightning_memopt.solvers import planner

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
}
PAPER = {"figure": "OLLA, Figure 7", "batch 1": 22.5, "batch 32": 10.1, "most": 38.0}
STEPS, MOST = 4, 16


def followed(status: RunStatus) -> bool:
    """Whether steps were measured, and all of them as planned."""
    return status.measured_peak_nbytes is not None and not status.deviates


def train(name: str, batch: int, optimizer: str, steps: int = MOST, **options: Any) -> tuple[list[torch.Tensor], Any, int]:
    """Parameters after the steps, the run's status (None for the unmodified loop), and how many steps that were: with a
    plan, they end when it was followed and measured.
    """
    model, inputs = built(name, batch)
    o = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(1)
    run: Any
    with optimize(model, o, profile_steps=2, verbose=False, **options) if options else contextlib.nullcontext() as run:
        for step in range(1, steps + 1):
            loss = model(**inputs).loss
            with run.last_backward() if run else contextlib.nullcontext():
                loss.backward()
            o.step()
            o.zero_grad()
            if run and step >= STEPS and followed(run.status()):
                break
    return [p.detach() for p in model.parameters()], run.status() if run else None, step


def rows(name: str, batch: int, optimizer: str, budget: str) -> dict[str, Any]:
    """The row of a model: `measured_nbytes` and `predicted_nbytes` are beside what the process held before each run."""
    row: dict[str, Any] = dict(model=name, batch=batch, optimizer=optimizer, plan="none" if budget != "min" else "smallest")
    plain: dict[int, list[torch.Tensor]] = {}
    exact = True
    for mode in ("never", "always"):
        held = held_nbytes()
        params, status, steps = train(name, batch, optimizer, budget=budget, optimizer_in_backward=mode)
        peaks = {"measured_nbytes": status.measured_peak_nbytes, "predicted_nbytes": status.plan.predicted_peak_nbytes}
        row[mode] = {peak: nbytes - held for peak, nbytes in peaks.items()}
        row[mode]["replayed_ops"] = status.plan.predicted.rebuilt_ops
        if not followed(status):
            row[mode]["left_plan"] = True
        if steps not in plain:
            plain[steps] = train(name, batch, optimizer, steps)[0]
        exact = exact and all(map(torch.equal, plain[steps], params))
    row["parameter_nbytes"] = sum(p.nbytes for p in params)
    row["reduction"] = round(100 * (1 - row["always"]["measured_nbytes"] / row["never"]["measured_nbytes"]), 2)
    row["exact"] = exact
    return row


def chosen(name: str, batch: int, optimizer: str) -> Iterator[dict[str, Any]]:
    """Rows of what "auto" chooses against the rule of "always", for the smallest plan, which runs, and for a budget halfway to
    what the step takes without a plan, as predicted. `extra_ms`: of the whole plan, early updates included.
    """
    peaks = {}
    for mode in ("always", "auto"):
        held = held_nbytes()
        params, status, steps = train(name, batch, optimizer, budget="min", optimizer_in_backward=mode)
        peaks[mode] = status.measured_peak_nbytes - held
    exact = all(map(torch.equal, train(name, batch, optimizer, steps)[0], params))
    frontier = status.frontier
    machine, graph = frontier.machine, frontier.graph
    smallest, usual = frontier.smallest_nbytes, status.plan.unmodified_peak_nbytes
    for budget in (smallest, (smallest + usual) // 2):
        rule = planner.solve(graph, replace(machine, update_seconds=0.0), budgets=[budget]).plan(budget)
        plan = planner.solve(graph, machine, budgets=[budget]).plan(budget)
        all_of_them = machine.update_seconds * len(rule.updates)
        yield {
            "model": name,
            "batch": batch,
            "optimizer": optimizer,
            "budget": "smallest" if budget == smallest else "middle",
            "updates": [len(rule.updates), len(plan.updates)],
            "peak_nbytes": [rule.predicted.peak_nbytes, plan.predicted.peak_nbytes],
            "extra_ms": [1e3 * (rule.predicted.seconds + all_of_them), 1e3 * plan.predicted.seconds],
            "bound_ms": 1e3 * plan.lower_bound_seconds,
            "measured_nbytes": [*peaks.values()] if budget == smallest else None,
            "exact": exact,
        }


def choose(models: Iterable[str], batches: Iterable[int], output: Path) -> None:
    found = []
    for name, batch, optimizer in itertools.product(models, batches, OPTIMIZERS):
        for row in chosen(name, batch, optimizer):
            found.append(row)
            (all_early, few), (rule, plan) = row["updates"], row["extra_ms"]
            worse = "" if plan <= rule + 1e-6 else " WORSE"
            print(f"{name:10} {batch:3} {optimizer:5} {row['budget']:8} early {all_early:4} {few:4}", end=" ", flush=True)
            print(f"extra {rule:8.2f} {plan:8.2f} ms, no plan below {row['bound_ms']:8.2f}{worse}", flush=True)
            output.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--budget", default="8GiB", help="holds the unmodified step of every model")
    parser.add_argument("--chosen", action="store_true", help="which updates a plan chooses")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    batches = [*map(int, arguments.batches.split(","))]
    if arguments.chosen:
        choose(arguments.models.split(","), batches, Path(arguments.output or RESULTS / "in_backward_chosen.json"))
        return
    output = Path(arguments.output or RESULTS / "in_backward.json")
    found: list[dict[str, Any]] = json.loads(output.read_text())["rows"] if output.exists() else []  # goes on where it stopped
    done = {tuple(row[key] for key in ("model", "batch", "optimizer", "plan")) for row in found}
    for name in arguments.models.split(","):
        for batch in batches:
            for optimizer in OPTIMIZERS:
                for budget in (arguments.budget, "min"):
                    if (name, batch, optimizer, "smallest" if budget == "min" else "none") in done:
                        continue
                    row = rows(name, batch, optimizer, budget)
                    found.append(row)
                    mib = [row[mode]["measured_nbytes"] / 2**20 for mode in ("never", "always")]
                    print(f"{name:10} {batch:3} {optimizer:5} {row['plan']:9}", *(f"{m:9.2f}" for m in mib), end=" ")
                    print(f"-{row['reduction']:.1f} % {'exact' if row['exact'] else 'WRONG'}", flush=True)
                    text = json.dumps({"paper": PAPER, "torch": torch.__version__, "rows": found}, indent=1)
                    output.write_text(text + "\n")


if __name__ == "__main__":
    main()
