"""Ranks with gloo between them that train models sharded by FSDP2: `python -m tests.cpu.lib.sharded FOLDER WORLD [CASE ...]`.
Rank r writes what each case came to into FOLDER/r.json.

Imports are made once: the ranks are forked, before anything has run.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptModelParallelStrategy, optimize
from lightning_memopt.errors import MemOptError
from lightning_memopt.native import counter
from lightning_memopt.session import times
from lightning_memopt.trace import count_all
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.process import digest
from tests.cpu.lib.said import listening
from tests.cpu.lib.settled import settles
from tests.cpu.lib.times import OfOps

WIDTH, LENGTH, BATCH, WORDS, STEPS = 32, 24, 8, 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.inner(x).split(WIDTH, 2))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(2, 3) / 3).masked_fill(~mask, -1e4).softmax(3)
        return self.outer((functional.dropout(scores, 0.1, self.training) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attention(self.first(x)), 0.1, self.training)
        return x + self.mlp(self.second(x))


class Language(nn.Module):
    """A small GPT, with dropout and a tied head. `skipped`: blocks that the next forward leaves out."""

    skipped: tuple[int, ...] = ()

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.words(words) + self.places.weight, 0.1, self.training)
        for i, block in enumerate(self.blocks):
            x = x if i in self.skipped else block(x)
        return self.head(self.last(x))


def shard(
    model: Language, nested: bool = False, root: bool | int | None = None, prefetches: bool = False, **options: Any
) -> nn.Module:
    """Each block is a unit, and the model; with `nested`, the attention within a block, too. `prefetches`: each block gathers
    the weights of the next.
    """
    for block in model.blocks:
        if nested:
            fully_shard(block.attention, **options)
        fully_shard(block, **options)
    options.pop("reshard_after_forward", None)
    fully_shard(model, **options, **({} if root is None else {"reshard_after_forward": root}))
    for one, other in itertools.pairwise(model.blocks) if prefetches else ():
        one.set_modules_to_forward_prefetch([other])  # type: ignore[operator]
        other.set_modules_to_backward_prefetch([one])  # type: ignore[operator]
    return model


@dataclass(frozen=True)
class Case:
    """A way to shard, and a loop.

    shard: options of `shard`.
    memopt: options of `optimize`.
    parts: forwards and backwards before an update.
    clip: gradients are clipped by their norm.
    hold_sync: gradients are reduced in the last backward of a step only.
    skips: a planned step leaves out a block.
    """

    shard: dict[str, Any] = field(default_factory=dict)
    memopt: dict[str, Any] = field(default_factory=dict)
    parts: int = 1
    clip: bool = False
    hold_sync: bool = False
    skips: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "blocks": Case(),
    "keeps weights": Case({"reshard_after_forward": False}),
    "root reshards": Case({"root": True, "prefetches": True}),
    "nested": Case({"nested": True}),
    "bf16": Case({"mp_policy": BF16}),
    "offloaded": Case({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "accumulates": Case(parts=2, clip=True),
    "holds sync": Case(parts=2, hold_sync=True),
    "skips": Case(skips=True, optimizer=torch.optim.SGD),
}
FOUR = {"smaller mesh": Case({"reshard_after_forward": 2})}
"""Cases for four ranks."""


def data(step: int, part: int) -> torch.Tensor:
    """Another batch in each rank."""
    seed = 100 * (10 * step + part) + distributed.get_rank()
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def local(t: Any) -> Any:
    return t.to_local() if isinstance(t, DTensor) else t


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> str:
    """A hash of this rank's bits of parameters, optimizer state, losses and generator."""
    states = [local(t) for p in model.parameters() for t in (p, *optimizer.state.get(p, {}).values())]
    tensors = (t.detach().contiguous() for t in states if isinstance(t, torch.Tensor))
    return digest(losses, [t.view(torch.uint8) if t.dim() else t for t in tensors])


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Grows by the most bytes of the block, by the allocator's counter."""
    counts = counter()
    window = counts.window() if counts is not None else None
    peaks: list[int] = []
    yield peaks
    if window is not None:
        peaks.append(window.peak_nbytes)
        window.close()


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shard(Language(), **case.shard)
    optimizer = case.optimizer(model.parameters(), lr=1e-2)
    torch.manual_seed(5 + distributed.get_rank())
    return model, optimizer


def train(case: Case, planned: bool, states: Any = None, steps: range = range(STEPS), **options: Any) -> dict[str, Any]:
    """A loop over the sharded model, and what it ends with. `states`: those of a checkpoint from which it goes on."""
    gc.collect()  # a sharded model is in reference cycles: the one before may go in the middle of this training
    model, optimizer = made(case)
    if states is not None:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        torch.set_rng_state(states[2])
    losses: list[float] = []
    memopt: dict[str, Any] = {"budget": "min", "profile_steps": 1, "solver_seconds": 0.3} | case.memopt | options
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(listening())
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        run = stack.enter_context(optimize(model, optimizer, **memopt)) if planned else None
        for i in steps:
            with peak() as peaks:
                for part in range(case.parts):
                    if case.hold_sync:
                        model.set_requires_gradient_sync(part == case.parts - 1)  # type: ignore[operator]
                        model.set_is_last_backward(part == case.parts - 1)  # type: ignore[operator]
                    model.skipped = (1,) if case.skips and i == 2 else ()  # type: ignore[assignment]
                    words = data(i, part)
                    loss = functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
                    last = run is not None and part == case.parts - 1
                    with run.last_backward() if run is not None and last else contextlib.nullcontext():
                        loss.backward()
                    losses.append(loss.item())
                if case.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                del loss
        status = run.status() if run is not None else None
    found: dict[str, Any] = {
        "state": bits_of(model, optimizer, losses),
        "states": (model.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
        "peak": peaks[0] if peaks else None,
        "said": said.getvalue() + "".join(str(w.message) for w in warned),
    }
    if status is not None and status.plan is not None:
        predicted = status.plan.predicted
        found |= {
            "needs": status.plan.budget_nbytes,
            "predicted": predicted.peak_nbytes,
            "rebuilt": predicted.rebuilt_ops,
            "measured": status.measured_peak_nbytes,
            "unmodified": status.plan.unmodified_peak_nbytes,
        }
    return found


def without_states(found: dict[str, Any]) -> dict[str, Any]:
    del found["states"]
    return found


def budgets() -> dict[str, Any]:
    """Each rank has a budget in bytes of its own, so the plans differ."""
    smallest = train(Case(), True)
    share = (1 + distributed.get_rank()) / (2 + distributed.get_world_size())
    budget = smallest["needs"] + int(share * (smallest["unmodified"] - smallest["needs"]))
    return {"plain": without_states(train(Case(), False)), "planned": without_states(train(Case(), True, budget=budget))} | {
        "budget": budget
    }


def resumed() -> dict[str, Any]:
    """A checkpoint of a run, with a plan or without, from which a run goes on, without a plan or with one."""
    halves = range(STEPS), range(STEPS, 2 * STEPS)
    found = {}
    for first, seconds in ((False, (False, True)), (True, (False,))):
        states = train(Case(), first, steps=halves[0])["states"]
        for second in seconds:
            found[f"{first} {second}"] = train(Case(), second, copy.deepcopy(states), halves[1])["state"]
    return found


def out_of_window() -> dict[str, Any]:
    """Between forward and backward, somebody asks for a tensor whose rebuild needs weights that are away. Training goes on."""
    found: dict[str, Any] = {"errors": []}
    for planned in (False, True):
        model, optimizer = made(Case())
        options: Any = {"budget": "min", "profile_steps": 1, "solver_seconds": 0.3, "verbose": False}
        with optimize(model, optimizer, **options) if planned else contextlib.nullcontext():
            for i in range(STEPS):
                loss = functional.cross_entropy(model(data(i, 0)).flatten(0, 1), data(i, 0).flatten())
                nodes = [loss.grad_fn] if planned and i == STEPS - 1 else []
                for node in nodes:
                    nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]  # type: ignore[union-attr]
                    try:
                        getattr(node, "_saved_mat1", None)
                    except MemOptError as error:
                        found["errors"].append([type(error).__name__, str(error)])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found["planned" if planned else "plain"] = bits_of(model, optimizer, [])
    return found


def refused() -> dict[str, Any]:
    """Ways to split a model that are refused by name, before anything runs."""
    world = distributed.get_world_size()
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    columns = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def entered(model: nn.Module, **options: Any) -> list[str]:
        try:
            with optimize(model, torch.optim.SGD(model.parameters(), 0.1), **{"budget": "min", "verbose": False} | options):
                return ["entered", ""]
        except MemOptError as error:
            return [type(error).__name__, str(error)]

    twice = fully_shard(parallelize_module(net(), square["b"], columns), mesh=square["a"])
    staged = net()
    stage = PipelineStage(staged, distributed.get_rank(), world, torch.device("cpu"))
    found = {
        "tensor parallel": entered(parallelize_module(net(), line, columns)),
        "hybrid": entered(fully_shard(net(), mesh=square)),
        "both": entered(twice),
        "pipeline": entered(staged),
        "offload": entered(fully_shard(net()), offload="disk"),
        "updates": entered(fully_shard(net()), optimizer_in_backward="always"),
        "meta": entered(fully_shard(net().to("meta")).to_empty(device="cpu")),  # type: ignore[attr-defined]
    }
    del stage
    return found


class Task(pl.LightningModule):
    """A language model that Lightning trains, sharded in `configure_model`."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = shard(Language(), mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        words = batch[0]
        return functional.cross_entropy(self.net(words).flatten(0, 1), words.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(strategy: Any) -> dict[str, Any]:
    """A fit in this process, which is a rank already."""
    words = torch.randint(0, WORDS, (96, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=distributed.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Task()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(task, DataLoader(TensorDataset(words), BATCH))
    found = {"state": bits_of(task, trainer.optimizers[0], []), "steps": trainer.global_step}
    if hasattr(trainer.strategy, "status"):
        status = trainer.strategy.status()
        found["rebuilt"] = status.plan.predicted.rebuilt_ops
        found["peaks"] = [status.plan.predicted.peak_nbytes, status.measured_peak_nbytes]
    return found


def lightning() -> dict[str, Any]:
    """Lightning's own strategy, and ours."""
    options: Any = {"budget": "min", "profile_steps": 1, "solver_seconds": 0.3, "process_group_backend": "gloo"}
    return {
        "plain": fitted(ModelParallelStrategy(distributed.get_world_size(), 1, process_group_backend="gloo")),
        "planned": fitted(MemOptModelParallelStrategy(**options)),
        "registered": "memopt_fsdp2" in StrategyRegistry,
    }


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "budgets": budgets,
    "resumed": resumed,
    "settles": settles,
    "out of window": out_of_window,
    "refused": refused,
    "lightning": lightning,
}


def rank(number: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(number), "NODE_RANK": "0"}  # where Lightning finds that it need not start the others
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=world)
    count_all(print)
    found: dict[str, Any] = {}
    for name in cases:
        if name in CASES | FOUR:
            found[name] = {how: without_states(train((CASES | FOUR)[name], how == "planned")) for how in ("plain", "planned")}
        else:
            found[name] = OTHERS[name]()
        distributed.barrier()  # nobody is left waiting in a collective of the case before
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    times.current = OfOps()
    world = int(sys.argv[2])
    arguments = [(number, world, Path(sys.argv[1]), sys.argv[3:] or [*CASES, *OTHERS]) for number in range(world)]
    sys.exit(failed(forked(rank, arguments)))
