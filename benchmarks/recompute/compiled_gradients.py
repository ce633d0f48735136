"""How far the gradients of compiled models are from eager code's, with plans and without.

    python -m benchmarks compiled_gradients [MODEL ...]      # writes results/compiled_gradients.json, a case at a time
    python -m benchmarks compiled_gradients --table          # what is recorded, as Markdown

Inductor on the CPU, one thread, dropout off (compiled code draws other noise than eager code), weights that do not change. The
distance of a gradient is its largest difference from eager code's, as a share of the largest entry of eager code's. Each row
has the largest distance of all parameters, and their median. `double`: eager code in double precision, which shows how far
eager code is itself from the gradient that it computes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.lib.compiled_steps import STEPS, Training
from benchmarks.lib.paths import RESULTS
from lightning_memopt import optimize
from lightning_memopt.bench.torch_compiled import torch_splits
from lightning_memopt.session.regions import region_choice
from lightning_memopt.trace import count_all

FILE = RESULTS / "compiled_gradients.json"
COMPILED = ("gpt2", "llama", "bert", "vit", "resnet50", "t5")
TORCH = ("torch 1.0", "torch 0.5", "torch 0.1")
CASES = ("double", *TORCH, "keep all", "min")

Gradients = dict[str, Tensor]


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


class _Still(Training):
    """A training without dropout whose weights stay as they are."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        _no_dropout(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)

    def gradients(self, double: bool = False) -> Gradients:
        """Those of one more step."""
        if double:
            self.model.double()
            self.batch = {key: x.double() if x.is_floating_point() else x for key, x in self.batch.items()}
        self.call(**self.batch).loss.backward()
        self.optimizer.step()
        made = {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return made


def gradients(model: str, case: str) -> Gradients:
    """The gradients of a step in which everything is compiled, and the plan is in force where the case has one."""
    if case in ("eager", "double"):
        return _Still(f"{model}/").gradients(double=case == "double")
    if case in TORCH:
        with torch_splits(float(case.removeprefix("torch "))):
            return _Still(model).gradients()
    training = _Still(model)
    keeping: Any = lambda choice, stages, limit: [0] * len(stages)  # noqa: E731
    better = region_choice.Choice.better if case == "min" else keeping
    with (
        mock.patch.object(region_choice.Choice, "better", better),
        optimize(training.model, training.optimizer, budget="min", profile_steps=1, solver_seconds=10, verbose=False) as run,
    ):
        for _ in range(STEPS):
            training.step()
        assert not (run.status().compiled or "0 of").startswith("0 of"), "regions have plans"
        return training.gradients()


def distances(ours: Gradients, eager: Gradients) -> list[float]:
    """Of each parameter. One whose gradient is zero in exact arithmetic (a bias before a normalisation) counts by its layer's
    weights: it has no entry that is not an error of rounding.
    """
    largest = max(float(gradient.abs().max()) for gradient in eager.values())
    scales = {name: float(gradient.abs().max()) for name, gradient in eager.items()}
    return [
        float((ours[name] - gradient).abs().max()) / scales[name]
        for name, gradient in eager.items()
        if scales[name] > 1e-6 * largest
    ]


def table(results: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        f"| model | {' | '.join(CASES)} |",
        f"|---|{'---|' * len(CASES)}",
    ]
    for model, cases in results.items():
        cells = [f"{cases[case][0]:.1e} / {cases[case][1]:.1e}" if case in cases else "" for case in CASES]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(COMPILED)}")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        os.environ["MEMOPT_CACHE"] = "0"
        count_all(print)
        for model in args.models or COMPILED:
            eager = gradients(model, "eager")
            for case in CASES:
                off = distances(gradients(model, case), eager)
                results.setdefault(model, {})[case] = [max(off), statistics.median(off)]
                print(model, case, results[model][case], flush=True)
                FILE.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
