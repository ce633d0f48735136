"""Whether planned steps leave anything behind, by either engine, also where they depart from the plan or raise.

    python -m benchmarks leak [--steps 5000]      # both engines, writes results/leak.json
    python -m benchmarks leak --table             # what is recorded, as Markdown

The plan rebuilds tensors, parks others in a file, and encodes some of these. Every 50 steps one departs from it, in turn by
another shape, a backward that never comes, a retained graph, and another op. Every 70 steps one raises, in turn in backward
and in forward. A sample is taken every 25 steps, after a garbage collection; samples.py says what growth is allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.robustness.samples import EVERY, Samples, fixed_rates, leaks, sample, table
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import engine
from lightning_memopt.native import install as install_counter
from lightning_memopt.plan.forms import codec_of

FILE = RESULTS / "leak.json"
ENGINES = ("python", "native")
DEPARTS, RAISES = 50, 70
WARM = 400
"""After this many steps, every deviation has occurred twice: the state of the other shape exists, and has learned its
templates.
"""
DEPARTURES = ("op", "shape", "no backward", "retained")


class Left(Exception):
    """What a step raises here."""


@torch.library.custom_op("memopt_leak::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Nobody knows that it may run again: its result is kept, or parked."""
    return x * 2


twice.register_autograd(lambda ctx, grad: grad * 2)


class Mixed(nn.Module):
    """Tensors to rebuild, to park, and to park at one bit a value; batch norm, dropout, and a write in place.

    departs: the next forward has another op. raises: where the next step raises, "forward" or "backward".
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.departs, self.raises = False, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        for layer in self.layers:
            h = twice(torch.relu(twice(h) - 0.1))
            h = h.sin_() if self.departs else h.sin()
            h = twice(h) + nn.functional.dropout(nn.functional.gelu(layer(h)), 0.1)
            self._raise("forward")
        h.register_hook(lambda grad: self._raise("backward"))
        h = torch.cat([h.tanh(), h, h, h.sigmoid()], 1).mul_(0.5)
        return self.last(twice(h)[:, :64])

    def _raise(self, where: str) -> None:
        if self.raises == where:
            raise Left(where)


class Steps:
    """Steps of a model, some of which depart or raise. `run`: the run that they are planned by."""

    def __init__(self, rows: int = 128) -> None:
        torch.manual_seed(0)
        self.model = Mixed()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x, self.y = torch.randn(rows, 16), torch.randint(0, 8, (rows,))
        self.departed = self.raised = 0

    def step(self, departure: str = "", raises: str = "") -> None:
        """`departure`: of DEPARTURES, or none. `raises`: "forward", "backward", or none; the error is caught."""
        rows = len(self.x) * 3 // 4 if departure == "shape" else len(self.x)
        self.model.departs, self.model.raises = departure == "op", raises
        with contextlib.suppress(Left):
            loss = nn.functional.cross_entropy(self.model(self.x[:rows]), self.y[:rows])
            if departure == "retained":
                loss.backward(retain_graph=True)
            if departure != "no backward":
                loss.backward()
                self.optimizer.step()
        self.optimizer.zero_grad()

    def numbered(self, i: int) -> None:
        """Step i of a run that departs and raises as the module says."""
        if i % RAISES == RAISES - 1:
            self.raised += 1
            self.step(raises=("forward", "backward")[self.raised % 2])
        elif i % DEPARTS == DEPARTS - 1:
            self.departed += 1
            self.step(DEPARTURES[self.departed % len(DEPARTURES)])
        else:
            self.step()


@contextlib.contextmanager
def planned() -> Iterator[tuple[Steps, Run]]:
    """Steps that are under a plan from now on, which rebuilds, parks, and encodes."""
    steps = Steps()
    options: dict[str, Any] = {"budget": "min", "max_slowdown": math.inf, "offload": "disk", "compress": "lossless"}
    with fixed_rates(), optimize(steps.model, steps.optimizer, profile_steps=2, verbose=False, **options) as run:
        for _ in range(6):
            steps.step()
        assert run.plan is not None
        forms = {life.form for life in run.plan.lives if life.how == "fetch"}
        assert run.plan.predicted.rebuilt_ops and "disk" in forms and any(map(codec_of, forms)), forms
        yield steps, run


def measured(count: int) -> dict[str, Any]:
    """`count` steps by the engine of this process."""
    install_counter()
    samples = Samples(count // EVERY + 1, WARM)
    with planned() as (steps, run):
        native = engine.loaded()
        before = native.counts() if native is not None else (0, 0)
        gc.collect()
        gc.freeze()  # what modules made is not walked for each sample, and not counted
        for i in range(count):
            steps.numbered(i)
            if i % EVERY == EVERY // 2:  # never right after a departure
                samples.take(sample(run, steps.model, steps.optimizer))
        after = native.counts() if native is not None else (0, 0)
        assert run.status().phase == "planned"
        native_ops, python_ops = (b - a for a, b in zip(before, after, strict=True))
    return {
        "engine": "native" if native is not None else "python",
        "steps": count,
        "departures": steps.departed,
        "exceptions": steps.raised,
        "native_ops": native_ops,
        "python_ops": python_ops,
        "samples": samples.count,
        "first_and_last": samples.ends,
        "growth": samples.growth(),
    }


def by(name: str, count: int) -> dict[str, Any]:
    """`measured`, by this engine, in a process of its own: what others left in this one may come and go."""
    environment = os.environ | {"MEMOPT_NATIVE": str(int(name == "native")), "MEMOPT_CACHE": "0"}
    command = [sys.executable, "-m", "benchmarks.robustness.leak", "--engine", name, "--steps", str(count)]
    result: dict[str, Any] = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines()[-1])
    return result


def _table(results: list[dict[str, Any]]) -> str:
    return table({f"{r['engine']} engine": r for r in results})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks leak")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--engine", choices=ENGINES, help="only this engine; the result is printed")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        print(_table(json.loads(FILE.read_text())["results"]))
        return 0
    if args.engine is not None:
        print(json.dumps(measured(args.steps)))
        return 0
    results = []
    for name in ENGINES:
        results.append(by(name, args.steps))
        if results[-1]["engine"] != name:
            print(f"the {name} engine is not there", file=sys.stderr)
            return 1
    FILE.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")
    print(_table(results))
    grown = {r["engine"]: leaks(r["growth"]) for r in results}
    for name, names in grown.items():
        print(f"{name}: {', '.join(names) or 'nothing'} grows")
    return int(any(grown.values()))


if __name__ == "__main__":
    sys.exit(main())
