"""Searches for a batch size on two ranks; `tests.cpu.lib.two_ranks` runs them in both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptBatchScaler, MemOptDDPStrategy, find_max_batch_size
from tests.cpu.lib.fits import Task, trainer_of
from tests.cpu.lib.loops import batches
from tests.cpu.lib.process import digest

LARGEST, SAMPLES = 50, 21
"""Larger batches run out of memory on one rank; this is the number of samples in the data of the other."""
PLENTY = 10_000_000
SCALED = ("plans", "no plans")


class OfRank:
    """A model with random numbers and, by default, buffers; its optimizer, and the body of its loop.

    sizes: of the batches that this rank's steps were called with.
    """

    def __init__(self, wrapped: bool = True, buffers: bool = True, **ddp: Any) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(64) if buffers else nn.LayerNorm(64)
        layers = [nn.Linear(16, 64), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        self.model: nn.Module = DistributedDataParallel(model, **ddp) if wrapped else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.sizes: list[int] = []

    def step(self, x: torch.Tensor, fault: Callable[[int], None] = lambda size: None) -> None:
        self.sizes.append(len(x))
        loss = self.model(x).square().mean()
        fault(len(x))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> str:
        return digest(self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state(), self.model.training)

    def search(self, budget: int, fault: Callable[[int], None] = lambda size: None, data: Any = None, **options: Any) -> Any:
        """What this rank's search came to, and what it left behind."""
        before, began = self.state(), time.monotonic()
        options = {"planned": False, "budget": budget, **options}
        outcome: dict[str, Any] = {"size": None, "error": ""}
        try:
            result = find_max_batch_size(
                lambda x: self.step(x, fault),
                data if data is not None else lambda size: torch.randn(size, 16),
                self.model,
                self.optimizer,
                **options,
            )
            outcome |= {"size": result.size, "peak": result.confirmed_peak_nbytes, "budget": result.budget_nbytes}
            outcome |= {"ranks": result.ranks, "said": str(result)}
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error}"
        return outcome | {"untouched": self.state() == before, "seconds": time.monotonic() - began, "sizes": self.sizes}


def raising(error: Exception, rank: int, above: int) -> Callable[[int], None]:
    """A step of this rank raises the error in a batch that is larger; before backward, where the others wait for it."""

    def fault(size: int) -> None:
        if distributed.get_rank() == rank and size > above:
            raise error

    return fault


def joined() -> Any:
    of_rank = OfRank(buffers=False)
    with Join([of_rank.model]):  # type: ignore[list-item]
        return of_rank.search(PLENTY)


def plain_loops() -> dict[str, Any]:
    """What each search came to on this rank."""
    rank = distributed.get_rank()
    own = 300_000 if rank else 600_000
    found = {
        "same": OfRank().search(300_000),
        "less room on 1": OfRank().search(own),
        "less room on 0": OfRank().search(900_000 - own),
        "plans": OfRank().search(own, planned=True, profile_steps=1),
        "static": OfRank(static_graph=True).search(own),
        "views": OfRank(gradient_as_bucket_view=True, find_unused_parameters=True).search(own),
        "out of memory": OfRank().search(PLENTY, raising(torch.OutOfMemoryError("tried to allocate"), 1, LARGEST)),
        "out of memory, plans": OfRank().search(
            PLENTY, raising(torch.OutOfMemoryError("tried to allocate"), 0, LARGEST), planned=True, max_size=64
        ),
        "raises": OfRank().search(PLENTY, raising(ValueError("the shard is empty"), 1, 4)),
        "raises, plans": OfRank().search(PLENTY, raising(ValueError("the shard is empty"), 0, 4), planned=True),
        "few samples": OfRank().search(
            PLENTY,
            data=DataLoader(torch.zeros(SAMPLES if rank else 100, 16), 4),  # type: ignore[arg-type]
        ),
        "nothing fits": OfRank(buffers=False).search(30_000 if rank else PLENTY),
        "other options": OfRank().search(PLENTY, effective=8 + rank),
        "energy": OfRank().search(PLENTY, mode="energy"),
        "in Join": joined(),
        "not wrapped": OfRank(wrapped=False).search(PLENTY),
    }
    return found


def fit(strategy: Any, size: int, accumulate: int, *callbacks: pl.Callback) -> Any:
    pl.seed_everything(3, verbose=False)
    trainer = trainer_of(
        strategy,
        devices=2,
        max_epochs=1,
        callbacks=list(callbacks),
        accumulate_grad_batches=accumulate,
        limit_train_batches=1.0,
    )
    trainer.fit(Task(), DataLoader(TensorDataset(*batches(1, 160)[0]), size))
    return trainer


def in_trainers() -> dict[str, Any]:
    """`MemOptBatchScaler` in Trainers with two devices, and the same run with the size written down."""
    rank, found = distributed.get_rank(), {}
    for name in SCALED:
        budget, options = f"{700_000 if rank else 2_000_000}", dict(process_group_backend="gloo")
        planned = name == "plans"
        strategy = MemOptDDPStrategy(budget=budget, verbose=False, **options) if planned else DDPStrategy(**options)  # type: ignore[arg-type]
        scaler = MemOptBatchScaler(budget=None if planned else budget, verbose=False)
        scaled = fit(strategy, 4, 10, scaler)
        assert scaler.result is not None
        size = scaler.result.size
        plain = fit(DDPStrategy(**options), size, 40 // size)  # type: ignore[arg-type]
        states = [digest(t.model.state_dict(), t.optimizers[0].state_dict()) for t in (scaled, plain)]
        found[name] = {"size": size, "said": scaler.summary(), "alike": states[0] == states[1], "steps": scaled.global_step}
    return found


def searches() -> dict[str, Any]:
    loops = plain_loops()
    distributed.barrier()
    time.sleep(0.2)  # the last rank to leave clears the store
    store: Any = distributed.distributed_c10d._get_default_store()
    left = [key for key in store.list_keys() if "memopt" in key] if hasattr(store, "list_keys") else []
    distributed.barrier()
    return {"loops": loops, "left": left, "trainers": in_trainers()}
