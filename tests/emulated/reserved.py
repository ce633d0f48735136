"""Reserved and allocated bytes of planned steps, predicted beside measured, on the emulated device in bytes mode.

Usage: python -m tests.emulated.reserved [--budgets SHARE ...] [--updates UPDATE ...] [--offload TIER] [--keep] [MODEL ...]

Without arguments: a choice of rows that takes some minutes. The whole table: --budgets 0 0.25 0.5 0.75 0.95 --updates foreach
fused for-loop. PYTORCH_ALLOC_CONF=expandable_segments:True is another allocator. `--keep` writes the rows into
benchmarks/results/reserved.json, from which `python docs/reserved.py` writes the page's table.

The allocator is torch's own caching allocator, the device an emulated one: nothing of this was measured on a GPU. A budget is a
share of the way from the smallest plan to the unmodified step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS as BENCHMARKS
from lightning_memopt import optimize
from lightning_memopt.plan.allocator import reserved
from lightning_memopt.solvers.rollout import keep_all
from tests.emulated import device

MIB = 1 << 20
SHARES = 0.0, 0.5
UPDATES = {"foreach": {}, "fused": {"fused": True}, "for-loop": {"foreach": False}}
"""How AdamW updates: torch's default on CUDA first."""
STEPS = 9
WORKSPACE_NBYTES = 64 << 20
"""Of cuBLAS on a device of capability 9.0, as in the profile of an H100."""
SLOW = "nmt", "deepspeech2"
"""Recurrent nets of thousands of small ops, whose observed steps take half a minute."""

Made = tuple[nn.Module, Callable[[], object]]
"""A module that returns its loss, and what makes its batch."""


class Loss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


def mlp() -> Made:
    """Eight blocks of 1024 x 4096, batches of 4096."""
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
    return nn.Sequential(*blocks).cuda(), lambda: torch.zeros(4096, 1024, device="cuda")


def benchmark(name: str) -> Made:
    """A model of the benchmarks, in their sizes."""
    model, batch, _ = BENCHMARKS[name]()
    on_device = {key: t.cuda() for key, t in batch.items()}
    return Loss(model).cuda(), lambda: on_device


MODELS: dict[str, Callable[[], Made]] = {"mlp": mlp, **{name: partial(benchmark, name) for name in BENCHMARKS}}


@dataclass(frozen=True)
class Row:
    """One run of some steps; bytes. `predicted` of the plan that was in force at its end, `measured` in its last step;
    `unmodified` is the predicted reserved peak of the step without a plan.
    """

    model: str
    update: str
    budget: int
    predicted_reserved: int
    measured_reserved: int
    predicted_allocated: int
    measured_allocated: int
    solver: str
    unmodified: int

    @property
    def error(self) -> float:
        """Of the reserved bytes: 0.01 is 1 % more predicted than measured."""
        return self.predicted_reserved / self.measured_reserved - 1

    @property
    def allocated_error(self) -> float:
        return self.predicted_allocated / self.measured_allocated - 1

    @property
    def is_above(self) -> bool:
        """Whether the step took more than its budget."""
        return self.measured_reserved > self.budget

    @property
    def holds(self) -> bool:
        """Whether the prediction and the budget do."""
        return abs(self.error) <= 0.03 and abs(self.allocated_error) <= 0.001 and not self.is_above

    def __str__(self) -> str:
        reserved, allocated = (
            (self.predicted_reserved, self.measured_reserved),
            (self.predicted_allocated, self.measured_allocated),
        )
        cells = [self.model, self.update, *(f"{n / MIB:.1f}" for n in (self.budget, *reserved, *allocated))]
        cells += [f"{100 * self.error:+.2f} %", f"{100 * self.allocated_error:+.3f} %", self.solver]
        return f"| {' | '.join(cells)}{' ABOVE THE BUDGET' * self.is_above} |"


HEADER = (
    "| model | update | budget | reserved: predicted | measured | allocated: predicted | measured | error | of allocated "
    "| plan |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def steady(step: Callable[[], None], steps: int) -> tuple[int, int]:
    """Bytes that torch's allocator reserves, and gives out, in the last of so many steps."""
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def run(
    name: str, made: Made, optimizer: torch.optim.Optimizer, budget: str | int, update: str, steps: int = STEPS, **options: Any
) -> Row:
    """A module trained within a budget."""
    module, batch = made
    with warnings.catch_warnings(), optimize(module, optimizer, budget=budget, verbose=False, **options) as session:
        warnings.simplefilter("ignore")

        def step() -> None:
            module(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        measured, allocated = steady(step, steps)
        status = session.status()
    plan, frontier = status.plan, status.frontier
    if plan is None or frontier is None:
        raise RuntimeError(f"{name} within {budget}: {status.phase}, {status.reason}")
    machine = frontier.machine
    predicted, unmodified = (
        reserved(status.graph, lives, machine.allocator, beginning=machine.beginning)
        for lives in (plan.lives, keep_all(status.graph))
    )
    numbers = plan.budget_nbytes, plan.predicted.reserved_nbytes, measured, predicted.allocated_nbytes, allocated
    return Row(name, update, *numbers, plan.solver, unmodified.peak_nbytes)


def train(model: str, budget: str | int, update: str = "foreach", offload: str = "none") -> Row:
    """A model trained within a budget, with one of `UPDATES`. `offload`: that option of a run; the smallest plan may then take
    any time.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    made = MODELS[model]()
    options = {} if offload == "none" else {"offload": offload, "max_slowdown": 1e6}
    return run(model, made, torch.optim.AdamW(made[0].parameters(), **UPDATES[update]), budget, update, **options)


def rows(model: str, update: str, shares: tuple[float, ...], offload: str = "none") -> Iterator[tuple[float, Row]]:
    """A model within some budgets, each with its share."""
    smallest = train(model, "min", update, offload)
    if 0 in shares:
        yield 0, smallest
    for share in filter(None, shares):
        budget = int(smallest.measured_reserved + share * (smallest.unmodified - smallest.measured_reserved))
        yield share, train(model, budget, update, offload)


def keep(share: float, row: Row) -> None:
    """Write a row into the file of results. It replaces one of the same model, update, allocator and budget."""
    path = RESULTS / "reserved.json"
    results = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    results["models"] = list(MODELS)
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    allocator = "expandable" if expandable else "default"
    results["rows"][f"{row.model} {row.update} {allocator} {share:g}"] = {"torch": torch.__version__, **asdict(row)}
    results["rows"] = dict(sorted(results["rows"].items()))
    path.write_text(json.dumps(results, indent=1) + "\n")


def summary(found: list[Row]) -> str:
    """What was kept, in one line."""
    within = sum(abs(row.error) <= 0.03 for row in found)
    close = sum(abs(row.allocated_error) <= 0.001 for row in found)
    exact = sum(row.predicted_reserved == row.measured_reserved for row in found)
    return (
        f"{len(found)} rows: reserved within 3 % in {within}, exact in {exact}; allocated within 0.1 % in {close}; "
        f"above the budget: {sum(row.is_above for row in found)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL", help=" ".join(MODELS))
    parser.add_argument("--budgets", nargs="+", type=float, default=SHARES, metavar="SHARE", help="0 is the smallest plan")
    parser.add_argument("--updates", nargs="+", choices=UPDATES, default=["foreach"])
    parser.add_argument("--offload", choices=["none", "host"], default="none", help="what rests is in this tier")
    parser.add_argument("--keep", action="store_true", help="write the rows into benchmarks/results/reserved.json")
    arguments = parser.parse_args()
    models = arguments.models or [name for name in MODELS if name not in SLOW]
    if arguments.keep and arguments.offload != "none":
        parser.error("--keep is for the table of runs without offload")
    if not device.is_emulated() or device.is_bits():
        parser.error("this needs the emulated device in bytes mode: make emulated")
    print("MiB; torch's own allocator on an emulated device, not on a GPU")
    print(HEADER)
    found = []
    for model in models:
        for update in arguments.updates:
            for share, row in rows(model, update, tuple(arguments.budgets), arguments.offload):
                print(row, flush=True)
                if arguments.keep:
                    keep(share, row)
                found.append(row)
    print(f"\n{summary(found)}")
    raise SystemExit(any(not row.holds for row in found))


if __name__ == "__main__":
    main()
