"""Two real processes with gloo between them train a model that is compiled by Inductor, in DistributedDataParallel.

`python -m tests.cpu.lib.compiled_ranks FOLDER CASE,CASE,... ...`: each group of cases has two processes, which run them in
turn. Rank r of a group writes the outcomes, by case, into FOLDER/CASE,CASE,....r.json.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.session.observe import observed_step
from lightning_memopt.session.regions import compiled_regions, region_choice
from lightning_memopt.solvers import planner
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.gloo import join
from tests.cpu.lib.process import digest

WORLD, STEPS, LAST = 2, 10, 3
PATIENT_SECONDS = 6.0
BACKEND = "aot_eager"
"""What ranks decide about regions does not depend on the backend. Inductor, whose code takes long to compile, has one case."""
Hook = Callable[[int], None]


class Net(nn.Module):
    """The weights of four layers need two buckets of 1 MiB, which is the smallest first one of dynamo."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, 64]. Returns a number."""
        for layer in self.layers:
            x = x + functional.dropout(layer(x), 0.1, self.training)
        return x.square().mean()


def train(
    budget: str | int | None,
    around: bool = True,
    rows: int = 1024,
    hook: Hook = lambda i: None,
    keeps_all: bool = False,
    layers: int = 4,
    backend: str = BACKEND,
    dynamic: bool | None = None,
) -> dict[str, Any]:
    """A loop of this rank, and what it ended with.

    Args:
        budget: None for the loop without us.
        around: the wrapper is compiled, not the model in it.
        hook: called before each forward, with the number of the step.
        keeps_all: the regions get the option that saves all, and runs nothing again.
        backend, dynamic: as `torch.compile` takes them.
    """
    rank = distributed.get_rank()
    compiler: dict[str, Any] = dict(backend=backend, dynamic=dynamic)
    torch._dynamo.reset()
    gc.collect()
    if around:
        model = DistributedDataParallel(Net(layers), bucket_cap_mb=1)
        call = torch.compile(model, **compiler)
    else:
        call = model = DistributedDataParallel(torch.compile(Net(layers), **compiler), bucket_cap_mb=1)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(5 + rank)
    losses, peaks, lines = [], [], []
    native = counter()
    assert native is not None
    window = native.window()
    assert window is not None
    with contextlib.ExitStack() as stack:
        run = None
        if budget is not None:
            options: dict[str, Any] = dict(profile_steps=1, solver_seconds=2, verbose=False)
            run = stack.enter_context(optimize(model, optimizer, budget=budget, **options))
            run.session.say = lines.append
        if keeps_all:
            choose = lambda choice, stages, limit: [0] * len(stages)  # noqa: E731
            stack.enter_context(mock.patch.object(region_choice.Choice, "better", choose))
        stack.enter_context(mock.patch.object(observed_step, "_ANNOUNCED", STEPS))  # each observed step has its line
        for i in range(STEPS):
            hook(i)
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(WORLD * i + rank))
            window.reset()
            loss = call(x)
            loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(window.peak_nbytes)
        status = None if run is None else run.status()
        stages = [] if run is None else run.session._compiled.stages_of_step()
    window.close()
    plan = None if status is None else status.plan
    return {
        "state": digest(model.state_dict(), optimizer.state_dict(), losses),
        "weights": [p.double().sum().item() for p in model.parameters()],
        "lives": [repr(stage.region.lives and sorted(map(repr, stage.region.lives))) for stage in stages],
        "planned": sum(stage.region.lives is not None for stage in stages),
        "regions": len(stages),
        "peak": max(peaks[-LAST:]),
        "unmodified": _unmodified(run),
        "predicted": None if plan is None else plan.predicted.needed_nbytes,
        "measured": None if status is None else status.measured_peak_nbytes,
        "compiled": None if status is None else status.compiled,
        "observed": sum("observing 1 step" in line for line in lines),
        "said": [line for line in lines if "compiled regions" in line],
    }


def _unmodified(run: Any) -> int | None:
    """The peak of the first step that was observed before regions were compiled again."""
    measured = [] if run is None else run.session._compiled._now.choice.measured
    return measured[0].peak_nbytes if measured else None


def budgets(around: bool, backend: str = BACKEND) -> dict[str, Any]:
    """Everything saved, the smallest plan, and a budget between the two."""
    keeps = train("min", around, keeps_all=True, backend=backend)
    smallest = train("min", around, backend=backend)
    budget = [(smallest["unmodified"] + smallest["measured"]) // 2]
    distributed.broadcast_object_list(budget)
    middle = train(budget[0], around, backend=backend)
    return {"keeps": keeps, "smallest": smallest, "middle": middle, "budget": budget[0]}


def other_shapes() -> dict[str, Any]:
    rows = 1024 - 128 * distributed.get_rank()
    return {"plain": train(None, rows=rows), "planned": train("min", rows=rows)}


def other_lengths_of_one_code() -> dict[str, Any]:
    """`dynamic=True`: the sizes of a region are symbols, so ranks with batches of other sizes have the same regions.

    Where dynamo splits a graph by buckets, the regions have numbers all the same.
    """
    options: dict[str, Any] = dict(rows=1024 - 128 * distributed.get_rank(), layers=2, dynamic=True)
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", False):
        return {"keeps": train("min", keeps_all=True, **options), "planned": train("min", **options)}


def compiles_on_one() -> dict[str, Any]:
    """Rank 1 compiles once more, in the second observed step."""

    def hook(i: int) -> None:
        if i == 1 and distributed.get_rank() == 1:
            torch._dynamo.reset()

    return {"keeps": train("min", keeps_all=True), "planned": train("min", hook=hook)}


def other_options() -> dict[str, Any]:
    """The solver of rank 1 has other plans than that of rank 0: it was short of time."""
    solve = planner.solve

    def short(*args: Any, **options: Any) -> Any:
        frontier = solve(*args, **options)
        return frontier if distributed.get_rank() == 0 or "dense" not in options else _halved(frontier)

    with mock.patch.object(planner, "solve", short):
        return train("min")


def _halved(frontier: Any) -> Any:
    return planner.Frontier(**(vars(frontier) | {"candidates": frontier.candidates[1::2]}))


def raises(rank: int) -> dict[str, Any]:
    """A rank fails at the end of an observed step, when it is to show its regions or to choose for them."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("the solver is broken")

    with contextlib.ExitStack() as stack:
        if distributed.get_rank() == rank:
            stack.enter_context(mock.patch.object(compiled_regions.CompiledRegions, "_shown", fail) if rank else
                                mock.patch.object(region_choice.Choice, "options", fail))  # fmt: skip
        return train("min")


CASES: dict[str, Callable[[], Any]] = {
    "around": lambda: budgets(around=True, backend="inductor"),
    "within": lambda: budgets(around=False),
    "other_shapes": other_shapes,
    "other_lengths_of_one_code": other_lengths_of_one_code,
    "compiles_on_one": compiles_on_one,
    "other_options": other_options,
    "raises_on_0": lambda: raises(0),
    "raises_on_1": lambda: raises(1),
}


def member(group: str, rank: int, folder: Path) -> None:
    join(folder / f"{group}.store", rank, WORLD, PATIENT_SECONDS)
    began = time.monotonic()
    try:
        outcome = {name: CASES[name]() for name in group.split(",")}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{group}.{rank}.json").write_text(json.dumps(outcome | {"seconds": time.monotonic() - began}))
    os._exit(0)  # a group in which a rank has failed cannot be ended in order


if __name__ == "__main__":
    members = [(group, rank, Path(sys.argv[1])) for group in sys.argv[2:] for rank in range(WORLD)]
    sys.exit(failed(forked(member, members, seconds=480)))
