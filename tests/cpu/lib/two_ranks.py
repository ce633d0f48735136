"""Two ranks, real processes with gloo between them, for tests of what is refused there and what is exact:
`python -m tests.cpu.lib.two_ranks FOLDER`. Rank r writes what each case came to into FOLDER/r.json.

Imports are made once: the ranks are forked, before anything has run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import (
    MemOptCallback,
    MemOptConfig,
    MemOptDDPStrategy,
    MemOptStrategy,
    optimize,
)
from lightning_memopt.session import times
from lightning_memopt.strategies import MemOptMixin
from tests.cpu.lib.early import counted
from tests.cpu.lib.fits import Task, trainer_of
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.loops import batches
from tests.cpu.lib.process import digest, model_of
from tests.cpu.lib.ranks_sizes import searches
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import OfOps

WORLD, STEPS = 2, 5


def data(i: int) -> torch.Tensor:
    """Another batch in each rank."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(WORLD * i + rank))


def alike(model: nn.Module) -> bool:
    """Whether the weights of all ranks have the same bits."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(WORLD)]
    distributed.all_gather(all_of_them, mine)
    return all(map(mine.equal, all_of_them))


def train(attach: Callable[[nn.Module], nn.Module] | None = None, mode: str = "never", **ddp: Any) -> dict[str, Any]:
    """A loop over a wrapped model, within the smallest plan of what `attach` gives of the wrapper, and what it ends with."""
    wrapped = DistributedDataParallel(model_of(), **ddp)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    options: dict[str, Any] = dict(budget="min", profile_steps=1, optimizer_in_backward=mode)
    torch.manual_seed(5 + distributed.get_rank())
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(listening())
        updates = counted(stack.enter_context(pytest.MonkeyPatch.context()))
        run = None if attach is None else stack.enter_context(optimize(attach(wrapped), optimizer, **options))
        for i in range(STEPS):
            loss = wrapped(data(i)).square().mean()
            with contextlib.nullcontext() if run is None else run.last_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        planned = run is not None and run.plan is not None and run.plan.predicted.rebuilt_ops
    return {
        "alike": alike(wrapped),
        "state": digest(wrapped.state_dict(), optimizer.state_dict()),
        "planned": planned,
        "updates": len(updates),
        "said": said.getvalue(),
    }


@contextlib.contextmanager
def begun_before() -> Iterator[Callable[[], dict[str, Any]]]:
    """F4: a run of each mode that knows its model before there are ranks; then what comes of it when there are."""
    models = {mode: model_of() for mode in ("auto", "always")}
    optimizers = {mode: torch.optim.AdamW(model.parameters(), 1e-2) for mode, model in models.items()}

    def steps(mode: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        wrapped = wrap(models[mode])
        for i in range(STEPS):
            loss = wrapped(data(i)).square().mean()
            with runs[mode].last_backward():
                loss.backward()
            optimizers[mode].step()
            optimizers[mode].zero_grad()

    def late() -> dict[str, Any]:
        return {
            mode: [*raised(lambda mode=mode: steps(mode, DistributedDataParallel)), alike(model)]  # type: ignore[misc]
            for mode, model in models.items()
        }

    options: dict[str, Any] = dict(budget="min", profile_steps=1, verbose=False)
    with contextlib.ExitStack() as stack:
        runs = {
            mode: stack.enter_context(optimize(model, optimizers[mode], optimizer_in_backward=mode, **options))
            for mode, model in models.items()
        }
        with pytest.MonkeyPatch.context() as patch:
            updates = counted(patch)
            for mode in models:
                steps(mode, lambda model: model)
        assert updates
        yield late


def raised(call: Callable[[], Any]) -> list[str]:
    """Name and message of the error."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def enter(model: nn.Module, mode: str) -> None:
    with optimize(model, torch.optim.AdamW(model.parameters()), budget="min", optimizer_in_backward=mode, verbose=False):
        pass


WRAPPERS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def in_loops() -> dict[str, Any]:
    """F4: the model in DistributedDataParallel, or the one in it, is given to `optimize`."""
    found: dict[str, Any] = {}
    for name, ddp in WRAPPERS.items():
        found[name] = {"plain": train(**ddp)}
        for mode in ("never", "auto"):
            found[name][mode] = train(lambda wrapped: wrapped, mode, **ddp)
        found[name]["within"] = train(lambda wrapped: wrapped.module, "auto", **ddp)  # type: ignore[return-value, arg-type]
    wrapped = DistributedDataParallel(model_of())
    found["refused"] = [raised(lambda m=m: enter(m, "always")) for m in (wrapped, wrapped.module)]  # type: ignore[misc]
    return found


def sharded() -> dict[str, Any]:
    """F5: FSDP1, of the model or of a part of it; it trains on afterwards."""
    found: dict[str, Any] = {}
    for part in (False, True):
        model = model_of()
        model.add_module("none", nn.BatchNorm1d(4))
        if part:
            model[4] = FullyShardedDataParallel(model[4], device_id=torch.device("cpu"))  # type: ignore[operator, index]
        else:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        found[str(part)] = [raised(lambda m=model, mode=mode: enter(m, mode)) for mode in ("never", "auto", "always")]  # type: ignore[misc]
        model(data(0)).square().mean().backward()
        found[str(part)].append(all(p.grad is not None for p in model.parameters()))
    return found


class Parallel(MemOptMixin, DDPStrategy):
    """A strategy as somebody may build it."""

    def __init__(self, mode: str) -> None:
        super().__init__(process_group_backend="gloo")
        self.memopt_config = MemOptConfig(budget="min", profile_steps=1, optimizer_in_backward=mode, verbose=False)  # type: ignore[arg-type]


def fit(strategy: Any, *callbacks: pl.Callback) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    trainer = trainer_of(strategy, devices=WORLD, max_epochs=1, callbacks=list(callbacks))
    trainer.fit(Task(), DataLoader(TensorDataset(*batches(1, 160)[0]), 16))
    return trainer


def fitted(strategy: Any, *callbacks: pl.Callback) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        updates = counted(patch)
        trainer = fit(strategy, *callbacks)
    state = digest(trainer.model.state_dict(), trainer.optimizers[0].state_dict())  # type: ignore[union-attr]
    statuses = [part.status() for part in (trainer.strategy, *callbacks) if hasattr(part, "status")]
    planned = [status.plan is not None and status.plan.predicted.rebuilt_ops for status in statuses]
    return {"state": state, "updates": len(updates), "planned": planned, "strategy": type(trainer.strategy).__name__}


def ours() -> dict[str, dict[str, Any]]:
    """What each way to a budget on several devices ends with."""
    options: dict[str, Any] = dict(budget="min", profile_steps=1, verbose=False)
    gloo = dict(process_group_backend="gloo")
    return {
        "becomes DDP": fitted(MemOptStrategy(**options, **gloo)),
        "views": fitted(MemOptStrategy(**options, **gloo, gradient_as_bucket_view=True)),
        "unused": fitted(MemOptDDPStrategy(**options, **gloo, find_unused_parameters=True)),
        "callback": fitted(DDPStrategy(**gloo), MemOptCallback(**options)),  # type: ignore[arg-type]
    }


def in_trainers() -> dict[str, Any]:
    """F4 in a Trainer with two devices."""
    return {
        "plain": fitted(DDPStrategy(process_group_backend="gloo")),
        "auto": fitted(Parallel("auto")),
        "always": raised(lambda: fit(Parallel("always"))),
        "ours": ours(),
        "strings": [type(trainer_of(name, devices=WORLD).strategy).__name__ for name in ("memopt", "memopt_ddp")],
    }


def rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(number), "NODE_RANK": "0"}  # where Lightning finds that it need not start the others
    store = distributed.FileStore(str(folder / "store"), WORLD)
    with begun_before() as late:
        distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
        found = {"begun_before": late()}
    for case in (in_loops, sharded, searches, in_trainers):
        found[case.__name__] = case()
        distributed.barrier()  # nobody is left waiting in a collective of the case before
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    times.current = OfOps()
    sys.exit(failed(forked(rank, [(number, Path(sys.argv[1])) for number in range(WORLD)])))
