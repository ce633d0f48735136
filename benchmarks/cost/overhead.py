"""What both engines cost an op over eager, beside an empty dispatch mode with detaching hooks. 4 x 4 tensors: pure overhead.

    python -m benchmarks overhead [-o benchmarks/results/overhead.json]

Paired and interleaved; medians of this thread's CPU time. Forward: for each op. Backward: for each op that runs again, the op
itself included; `op` is what such an op takes when it runs by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.native import engine as native_engine
from lightning_memopt.runtime import Learned, PlannedEngine, Program, install_native
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers import planner

REPEATS = 50


class Chain(nn.Module):
    """tanh(x * w + x), then sin: four ops a link."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(REPEATS):
            x = torch.tanh(x * self.w + x).sin()
        return x


class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the figures are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    install_native(print)
    model, x = Chain(), torch.randn(4, 4)
    observation = Observation(model, [], torch.device("cpu"), None, verify=True, meter=False)
    with observation.begin_round((x,)):
        y = model(x)
    observation.forward_ended()
    y.sum().backward()
    graph = observation.finish()
    assert graph is not None
    keep, drop = planner.solve(graph).candidates[-1], planner.solve(graph).candidates[0]
    ops = 4 * REPEATS
    rebuilt_ops = {}

    def planned(name: str, lives: Any, native: bool) -> Callable[[], contextlib.AbstractContextManager]:
        learned = Learned(Program(graph, lives))

        @contextlib.contextmanager
        def context():
            with contextlib.ExitStack() as stack:
                if not native:
                    stack.enter_context(mock.patch.object(native_engine, "_module", None))
                engine = PlannedEngine(learned)
                rebuilt_ops[name] = engine.rebuilt_ops
                yield stack.enter_context(PlannedRecording(engine, model))

        return context

    @contextlib.contextmanager
    def empty_and_hooks():
        with saved_tensors_hooks(lambda t: t.detach(), lambda t: t), Empty():
            yield

    variants: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
        "eager": contextlib.nullcontext,
        "empty mode": Empty,
        "empty mode + detaching hooks": empty_and_hooks,
    }
    for who in ("Python", "native"):
        for what, candidate in (("nothing", keep), ("all", drop)):
            name = f"{who} engine, {what} dropped"
            variants[name] = planned(name, candidate.lives, who == "native")
    forward: dict[str, list[float]] = {name: [] for name in variants}
    backward: dict[str, list[float]] = {name: [] for name in variants}
    clock = time.thread_time
    for _ in range(60):
        for name, context in variants.items():
            gc.collect()
            gc.disable()
            began = clock()
            with context():
                y = model(x)
            forward[name].append(clock() - began)
            loss = y.sum()
            began = clock()
            loss.backward()
            backward[name].append(clock() - began)
            gc.enable()
            del y, loss
    run = torch.ops.aten.tanh.default._op
    began = clock()
    for _ in range(10_000):
        run(x)
    op = 1e6 * (clock() - began) / 10_000
    eager = statistics.median(forward["eager"])
    table = {name: 1e6 * (statistics.median(s) - eager) / ops for name, s in forward.items()}
    print(f"eager: {1e6 * eager / ops:.2f} us an op; op: {op:.2f} us")
    rebuilds = {}
    for name, over in table.items():
        again = len(rebuilt_ops.get(name, ()))
        line = f"{name:32} {over:6.2f} us an op over eager"
        if again:
            more = statistics.median(a - b for a, b in zip(backward[name], backward["eager"], strict=True))
            rebuilds[name] = 1e6 * more / again
            line += f"; backward: {rebuilds[name]:.2f} us for each of {again} ops that run again"
        print(line)
    if options.output is not None:
        figures = {"eager_us": 1e6 * eager / ops, "op_us": op, "over_eager_us": table, "again_us": rebuilds}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
