"""What a rank does in `benchmarks hosts`: trains each case plainly and within plans, or dies while others train with it."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib.digests import hashed
from lightning_memopt import optimize
from lightning_memopt.session.ranks import shared_plan
from lightning_memopt.session.solve import solving
from lightning_memopt.trace import count_all

WORDS, WIDTH, LENGTH, BATCH, LAYERS, STEPS = 64, 64, 64, 24, 2, 6
OPTIONS: dict[str, Any] = {"profile_steps": 2, "solver_seconds": 0.3, "verbose": False}
BYTE_BUDGET_SHARE = 0.5
"""A budget in bytes is the smallest, and this share of what the unmodified step has above it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.inner(self.first(x)).chunk(3, 2))
        scores = functional.dropout((q @ k.transpose(2, 3) / 4).softmax(3), 0.1)
        x = x + self.outer((scores @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Language(nn.Module):
    """A transformer with dropout, without buffers: in `Join`, DDP would have to send them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A way to train on several ranks.

    sharded: by FSDP2; else DDP.
    parts: batches before an update; gradients are reduced in the backward of the last one only.
    uneven: later ranks have more batches than earlier ones, inside `Join`.
    early: within a plan, parameters are updated in backward.
    """

    sharded: bool = False
    parts: int = 1
    uneven: bool = False
    early: bool = False


CASES = {
    "ddp": Case(),
    "ddp, accumulation": Case(parts=2),
    "ddp, uneven": Case(uneven=True),
    "ddp, early updates": Case(early=True),
    "fsdp2": Case(sharded=True),
    "fsdp2, accumulation": Case(sharded=True, parts=2),
    "fsdp2, early updates": Case(sharded=True, early=True),
}
RESUMED = {"ddp, resumed": Case(), "fsdp2, resumed": Case(sharded=True)}
"""The unmodified run's checkpoint goes on within a plan, and the planned run's checkpoint goes on without one."""
PLANNED = ("min", "bytes", "plain, then min")
"""Kinds of runs that end within a plan; others end without one."""


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = Language()
    if not case.sharded:
        return DistributedDataParallel(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@contextlib.contextmanager
def reducing(model: nn.Module, last: bool) -> Any:
    """Around a forward and backward whose gradients are reduced only if it is the last before an update."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield


def train(
    case: Case,
    budget: int | str | None,
    states: Any = None,
    steps: range = range(STEPS),
    before: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """A training of this rank, and what it ends with.

    Args:
        budget: None trains without us.
        states: those of a checkpoint from which it goes on.
        before: called with the number of the step before each.
    """
    gc.collect()  # a sharded model is in reference cycles: the one before may go in the middle of this training
    rank = distributed.get_rank()
    model = made(case)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(10 + rank)
    if states is not None:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(copy.deepcopy(states[1]))  # it would train on in the tensors of the checkpoint
        torch.set_rng_state(states[2])
    losses = []
    with contextlib.ExitStack() as stack:
        options = OPTIONS | ({"optimizer_in_backward": "always"} if case.early else {})
        run = None if budget is None else stack.enter_context(optimize(model, optimizer, budget=budget, **options))
        if case.uneven:
            stack.enter_context(Join([model]))  # type: ignore[list-item]
            steps = range(steps.stop + rank)
        for i in steps:
            before(i)
            for part in range(case.parts):
                generator = torch.Generator().manual_seed(1000 * i + 100 * part + rank)
                words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
                with reducing(model, part == case.parts - 1):
                    loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
                    with run.last_backward() if run is not None and case.early else contextlib.nullcontext():
                        loss.backward()
                losses.append(loss.item())
                del loss
            optimizer.step()
            optimizer.zero_grad()
        status = None if run is None else run.status()
    optimized = [t for p in model.parameters() for t in optimizer.state[p].values()]
    result: dict[str, Any] = {
        "state": hashed([*model.parameters(), *optimized, torch.get_rng_state(), torch.tensor(losses, dtype=torch.float64)]),
        "weights": hashed(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()),
        "states": (model.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
    }
    if status is not None and status.plan is not None:
        result |= {
            "budget_nbytes": status.plan.budget_nbytes,
            "unmodified_nbytes": status.plan.unmodified_peak_nbytes,
            "predicted_nbytes": status.plan.predicted.peak_nbytes,
            "measured_nbytes": status.measured_peak_nbytes,
            "rebuilt_ops": status.plan.predicted.rebuilt_ops,
        }
    return result


def compared(case: Case) -> dict[str, Any]:
    """The unmodified run, the smallest plan, and a plan within a budget in bytes, which is the same on all ranks."""
    plain, smallest = train(case, None), train(case, "min")
    least, unmodified = smallest["budget_nbytes"], smallest["unmodified_nbytes"]
    budget = torch.tensor(least + int(BYTE_BUDGET_SHARE * (unmodified - least)))
    distributed.all_reduce(budget, distributed.ReduceOp.MAX)
    rows = {"plain": plain, "min": smallest, "bytes": train(case, int(budget))}
    return {kind: {name: value for name, value in row.items() if name != "states"} for kind, row in rows.items()}


def resumed(case: Case) -> dict[str, Any]:
    halves, rows = (range(STEPS), range(STEPS, 2 * STEPS)), {}
    plain, planned = (train(case, budget, steps=halves[0])["states"] for budget in (None, "min"))
    rows["plain"] = train(case, None, plain, halves[1])
    rows["plain, then min"] = train(case, "min", plain, halves[1])
    rows["min, then plain"] = train(case, None, planned, halves[1])
    return {kind: {name: value for name, value in row.items() if name != "states"} for kind, row in rows.items()}


def trains(folder: Path, names: list[str]) -> None:
    """Train the cases, and write what they came to into the folder."""
    results = {}
    for name in names:
        results[name] = resumed(RESUMED[name]) if name in RESUMED else compared(CASES[name])
        distributed.barrier()
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(results))


def dies(folder: Path, moment: str, victim: int) -> None:
    """Train by DDP until one rank is killed. The others write their error into the folder, and end with it."""
    rank = distributed.get_rank()

    def kill(*_: Any) -> Any:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def before(i: int) -> None:
        if rank == victim and i == {"observing": 1, "running": STEPS - 1}.get(moment):
            kill()

    if rank == victim and moment == "solving":
        solving.plan_for = kill  # type: ignore[assignment]
        shared_plan._sizes = kill  # type: ignore[assignment]
    try:
        train(Case(), "min", before=before)
    except Exception as error:
        ended = {"error": f"{type(error).__name__}: {error}", "at": time.time()}
        (folder / f"{rank}.json").write_text(json.dumps(ended))
        raise


def main(arguments: list[str]) -> None:
    """Be a rank: FOLDER CASE..., or FOLDER dies MOMENT VICTIM."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    count_all(print)
    folder = Path(arguments[0])
    if arguments[1] == "dies":
        dies(folder, arguments[2], int(arguments[3]))
    else:
        trains(folder, arguments[1:])
    distributed.destroy_process_group()
