"""Cost of recording one op, over eager, beside an empty dispatch mode with detaching hooks. 4 x 4 tensors: pure overhead.

    python -m benchmarks overhead [-o benchmarks/results/overhead.json]

Forward passes only, paired and interleaved; medians. The bar: at most 1.5 x (empty mode + detaching hooks), over eager.
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

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.runtime import Learned, PlannedEngine, Program
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

    def planned(lives: Any) -> Callable[[], contextlib.AbstractContextManager]:
        learned = Learned(Program(graph, lives))

        def context() -> contextlib.AbstractContextManager:
            engine = PlannedEngine(learned)
            return PlannedRecording(engine, model)

        return context

    @contextlib.contextmanager
    def empty_and_hooks():
        with saved_tensors_hooks(lambda t: t.detach(), lambda t: t), Empty():
            yield

    variants: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
        "eager": contextlib.nullcontext,
        "empty mode": Empty,
        "empty mode + detaching hooks": empty_and_hooks,
        "planned, nothing dropped": planned(keep.lives),
        "planned, all dropped": planned(drop.lives),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(60):
        for name, context in variants.items():
            gc.disable()
            began = time.perf_counter()
            with context():
                y = model(x)
            seconds[name].append(time.perf_counter() - began)
            gc.enable()
            del y
    eager = statistics.median(seconds["eager"])
    table = {name: 1e6 * (statistics.median(s) - eager) / ops for name, s in seconds.items()}
    reference = table["empty mode + detaching hooks"]
    for name, over in table.items():
        print(
            f"{name:32} {over:6.2f} us an op over eager ({1e6 * eager / ops:.2f} us)   x{over / reference:.2f} of mode + hooks"
        )
    if options.output is not None:
        options.output.write_text(json.dumps({"eager_us": 1e6 * eager / ops, "over_eager_us": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
