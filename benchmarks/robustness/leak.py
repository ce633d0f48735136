"""Whether planned steps leave anything behind, by either engine, also where they depart from the plan or raise.

    python -m benchmarks leak [--steps 5000]      # both engines, writes results/leak.json
    python -m benchmarks leak --table             # what is recorded, as Markdown

The plan rebuilds tensors, parks others in a file, and encodes some of these. Every 50 steps one departs from it, in turn by
another shape, a backward that never comes, a retained graph, and another op. Every 70 steps one raises, in turn in backward
and in forward. A sample is taken every 25 steps, after a garbage collection. The growth of a quantity is the slope of the line
of least squares through its samples, without those of the first fifth, times the steps from the first to the last of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from benchmarks.lib.paths import RESULTS, ROOT
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import counter, engine
from lightning_memopt.native import install as install_counter
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.plan.rates import Coding, Link, MachineRates
from lightning_memopt.record import StorageVersion, Tape
from lightning_memopt.runtime import Handle, Kept, PlannedEngine
from lightning_memopt.session import times

FILE = RESULTS / "leak.json"
ENGINES = ("python", "native")
DEPARTS, RAISES, SAMPLES = 50, 70, 25
WARM = 400
"""In so many steps every departure has come twice: the state of the other shape is there, and has learned its templates."""
DEPARTURES = ("op", "shape", "no backward", "retained")
ALLOWED: dict[str, float] = {"resident_nbytes": 1 << 20, "objects": 10, "python_blocks": 40, "references_to_none": 10}
"""The most that a quantity may grow by; nothing for those that are not here. Python makes objects of its own now and then. What
is left by each departure, or by each exception, of 5,000 steps exceeds these numbers."""

_LINK = Link(out_bytes_per_second=1e8, in_bytes_per_second=1e8)
_FAST = Coding(encode_bytes_per_second=1e12, decode_bytes_per_second=1e12)
RATES = MachineRates(name="a slow disk, fast codecs", links={"disk": _LINK}, codecs={"positive": _FAST, "bools": _FAST})


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


class _Times(times.Times):
    def of_transfers(self, measure: Any) -> MachineRates:
        return RATES


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
    before, times.current = times.current, _Times()
    steps = Steps()
    options: dict[str, Any] = {"budget": "min", "offload": "disk", "compress": "lossless"}
    try:
        with optimize(steps.model, steps.optimizer, profile_steps=2, verbose=False, **options) as run:
            for _ in range(6):
                steps.step()
            assert run.plan is not None
            forms = {life.form for life in run.plan.lives if life.how == "fetch"}
            assert run.plan.predicted.rebuilt_ops and "disk" in forms and any(map(codec_of, forms)), forms
            yield steps, run
    finally:
        times.current = before


def _hooks() -> int:
    """Hooks for all modules and optimizers, saved-tensor hooks, dispatch modes, and the collector's callbacks."""
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    count = sum(len(getattr(modules, f"_global_{name}")) for name in names)
    count += len(optimizers._global_optimizer_pre_hooks) + len(optimizers._global_optimizer_post_hooks)
    saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return count + (saving is not None) + len(_get_current_dispatch_mode_stack()) + len(gc.callbacks)


def _resident_nbytes() -> int:
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


NAMES = {
    "tensor_nbytes": "bytes of tensors",
    "resident_nbytes": "resident bytes of the process, after `malloc_trim`",
    "objects": "objects that the garbage collector knows",
    "our_objects": "tapes, engines, handles and storage versions among them",
    "python_blocks": "blocks of Python's allocator",
    "references_to_none": "references to `None`",
    "references_to_classes": "references to our classes: one for each object of them, known to the collector or not",
    "threads": "threads of Python",
    "system_threads": "threads of the process",
    "files": "open files",
    "hooks": "hooks and modes",
    "states": "plan states",
    "parked_nbytes": "bytes in tiers",
}
"""What a sample has."""
_OURS = Tape, PlannedEngine, Handle, Kept, StorageVersion


def sample(run: Run) -> dict[str, int]:
    """What is there after a step. Linux alone."""
    gc.collect()
    counts = counter()
    depots = [depot for _, depot in run.session._offloading.depots._of_plan.values() if depot is not None]
    objects = gc.get_objects()
    ours = sum(type(o) in _OURS for o in objects)
    number = len(objects)
    del objects
    return {
        "tensor_nbytes": counts.live_nbytes if counts is not None else 0,
        "resident_nbytes": _resident_nbytes(),
        "objects": number,
        "our_objects": ours,
        "python_blocks": sys.getallocatedblocks(),
        "references_to_none": sys.getrefcount(None),
        "references_to_classes": sum(map(sys.getrefcount, _OURS)),
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "hooks": _hooks(),
        "states": len(run.session._plan_cache),
        "parked_nbytes": sum(depot.used_nbytes for depot in depots),
    }


class Samples:
    """`count` samples, in memory that is there from the beginning: they do not grow themselves.

    values: quantity -> its values.
    """

    def __init__(self, count: int) -> None:
        self.count = 0
        self._room = count
        self.values: dict[str, array[int]] = {}

    def take(self, run: Run) -> None:
        for name, value in sample(run).items():
            if name not in self.values:
                self.values[name] = array("q", bytes(8 * self._room))
            self.values[name][self.count] = value
        self.count += 1

    def growth(self) -> dict[str, float]:
        """How much each quantity grows, after the first fifth, and after the first steps in any case."""
        begin = max(self.count // 5, WARM // SAMPLES)
        return {name: round(growth(values[begin : self.count]), 1) for name, values in self.values.items()}


def growth(values: Sequence[int]) -> float:
    """Of the least-squares line through the values, from the first to the last."""
    n, mean, middle = len(values), sum(values) / len(values), (len(values) - 1) / 2
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))
    return slope * (n - 1)


def leaks(grown: dict[str, float]) -> list[str]:
    """The quantities that grow more than they may."""
    return [name for name, value in grown.items() if value > ALLOWED.get(name, 0)]


def measured(count: int) -> dict[str, Any]:
    """`count` steps by the engine of this process."""
    install_counter()
    samples = Samples(count // SAMPLES + 1)
    with planned() as (steps, run):
        native = engine.loaded()
        before = native.counts() if native is not None else (0, 0)
        for i in range(count):
            steps.numbered(i)
            if i % SAMPLES == SAMPLES // 2:  # never right after a departure
                samples.take(run)
        after = native.counts() if native is not None else (0, 0)
        assert run.status().phase == "planned"
        native_ops, python_ops = (b - a for a, b in zip(before, after, strict=True))
    ends = {name: [values[0], values[samples.count - 1]] for name, values in samples.values.items()}
    return {
        "engine": "native" if native is not None else "python",
        "steps": count,
        "departures": steps.departed,
        "exceptions": steps.raised,
        "native_ops": native_ops,
        "python_ops": python_ops,
        "samples": samples.count,
        "first_and_last": ends,
        "growth": samples.growth(),
    }


def by(name: str, count: int) -> dict[str, Any]:
    """`measured`, by this engine, in a process of its own: what others left in this one may come and go."""
    environment = os.environ | {"MEMOPT_NATIVE": str(int(name == "native")), "MEMOPT_CACHE": "0"}
    command = [sys.executable, "-m", "benchmarks.robustness.leak", "--engine", name, "--steps", str(count)]
    result: dict[str, Any] = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines()[-1])
    return result


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(f"{r['engine']} engine" for r in results) + " |", "|---|" + "---|" * len(results)]
    for name in results[0]["growth"]:
        cells = (f"{r['growth'][name] + 0.0:+,.1f} ({r['first_and_last'][name][1]:,})" for r in results)
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks leak")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--engine", choices=ENGINES, help="only this engine; the result is printed")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        print(table(json.loads(FILE.read_text())["results"]))
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
    print(table(results))
    grown = {r["engine"]: leaks(r["growth"]) for r in results}
    for name, names in grown.items():
        print(f"{name}: {', '.join(names) or 'nothing'} grows")
    return int(any(grown.values()))


if __name__ == "__main__":
    sys.exit(main())
