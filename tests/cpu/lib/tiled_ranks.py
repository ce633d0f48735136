"""Loss heads in tiles in real processes with gloo between them: `python -m tests.cpu.lib.tiled_ranks FOLDER GROUP ...`.

A group is names of cases with commas between them, and has processes of its own, forked after all imports. Rank r of a group
writes what each case came to into FOLDER/GROUP.r.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers would import it in each process
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from lightning_memopt import optimize
from lightning_memopt.runtime.tiles import Proof, proof
from lightning_memopt.session import times
from lightning_memopt.session.tiling import Tiling
from lightning_memopt.torch_private import local_tensor
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.gloo import join
from tests.cpu.lib.process import digest
from tests.cpu.lib.times import OfOps
from tests.cpu.tiles.language_model import CLASSES, LanguageModel

WORLD, STEPS, BATCH, TOKENS = 2, 9, 4, 64
PATIENT_SECONDS = 3.0


class Sometimes(LanguageModel):
    """A layer of it has no gradient on rank 1. The loss is a part of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.hidden(ids)
        return self.head(self.other(hidden) if distributed.get_rank() == 0 else hidden), None


def batch(i: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(WORLD * i + distributed.get_rank())
    ids = torch.randint(0, CLASSES, (BATCH, tokens), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return ids, labels


def train(
    budget: Any,
    *,
    make: Callable[[], nn.Module] = LanguageModel,
    tokens: Callable[[int], int] = lambda i: TOKENS,
    accumulate: int = 1,
    metric: Callable[[int], bool] = lambda i: False,
    steps: int = STEPS,
    joined: bool = False,
    inner: bool = False,
    holds: bool = False,
    before: Callable[[nn.Module, int], None] = lambda model, i: None,
    saves: Path | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A loop of this rank, and what it came to. `budget`: None for the plain run. `metric`: whether a step reads the logits.
    `inner`: the model in the wrapper is given to `optimize`. `holds`: the loop reads the logits after the update. `before` runs
    before each step. `saves`: the plan is written there. `wrap`: shards the model; else it is in DistributedDataParallel.
    """
    rank = distributed.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(make(), **(ddp or {})) if wrap is None else wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(5 + rank)
    seen, lines = list[Any](), list[str]()
    with contextlib.ExitStack() as stack:
        run = None
        if budget is not None:
            given = model.module if inner else model
            options = {"tile": "exact", **options}
            run = stack.enter_context(optimize(given, optimizer, budget=budget, verbose=False, **options))
            run.session.say = run.session._tiling._say = lines.append
        if joined:
            stack.enter_context(Join([model]))
        for i in range(steps):
            before(model, i)
            for part in range(accumulate):
                ids, labels = batch(accumulate * i + part, tokens(i))
                with without_sync(model) if part + 1 < accumulate else contextlib.nullcontext():
                    logits, loss = model(ids, labels)
                    if loss is None:
                        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                    if metric(i):
                        seen.append((logits.argmax(-1) == labels).sum().item())
                    if not holds:
                        del logits
                    loss.backward()
                seen.append(loss.item())
            seen.append(digest([local_tensor(p.grad) for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            if holds:
                seen.append(digest(logits.detach()))
            if saves is not None and run is not None and i + 1 == steps:
                run.save_plan(saves)
    status = None if run is None else run.status()
    plan = None if status is None else status.plan
    tiles = [] if plan is None else [[head.rows, head.columns, head.threads] for head in plan.tiles]
    return {
        "state": digest(tree_map(local_tensor, [model.state_dict(), optimizer.state_dict()]), seen),
        "weights": [whole(p).double().sum().item() for p in model.parameters()],
        "lines": lines,
        "whole": [line for line in lines if line.startswith("MemOpt: no loss head runs in tiles: ")],
        "tiles": tiles,
        "lives": None if plan is None else repr(plan.lives),
        "predicted": None if plan is None else plan.predicted.needed_nbytes,
        "unmodified": None if plan is None else plan.unmodified_peak_nbytes,
        "measured": None if status is None else status.measured_peak_nbytes,
    }


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    yield
    model.set_requires_gradient_sync(True)  # type: ignore[operator]


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def sharded(head: bool | None = None) -> Callable[[nn.Module], nn.Module]:
    """`head`: the head is sharded by itself, and this is its `reshard_after_forward`; None: it is a part of the rest."""

    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        if head is not None:
            fully_shard(model.head, reshard_after_forward=head)  # type: ignore[arg-type]
        return fully_shard(model)

    return shard


def freed_from_now_on(model: nn.Module, i: int) -> None:
    """In the eighth step, when a plan in tiles is in force, the weights of the head begin to leave after the forward."""
    if i == 7:
        model.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


def proves_where_weights_leave(model: nn.Module, i: int) -> None:
    """The weights of the head leave after the forward in the step that compares tiles, and not in the step before."""
    if i == 3:
        model.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


class Tied(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


def exact(budget: Any = "min", **options: Any) -> dict[str, Any]:
    return {"plain": train(None, **options), "tiled": train(budget, **options)}


def in_budget(**options: Any) -> dict[str, Any]:
    """A budget that the step as it is does not keep on rank 1."""
    smallest = train("min", **options)
    budget = [(smallest["predicted"] + smallest["unmodified"]) // 2]
    distributed.broadcast_object_list(budget, src=1)
    found = exact(budget[0], **options)
    return {"budget": budget[0], "unmodified": smallest["unmodified"], **found}


def given() -> dict[str, Any]:
    """Both ranks are given a plan in tiles, of a file. Tiles of it give other bits on rank 1, in the run after that."""
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    path = Path(folder[0]) / "plan.json"
    train("min", saves=path if rank() == 0 else None)
    distributed.barrier()
    found = exact(plan=path)
    with on_rank(1, mock.patch.object(proof, "equal", lambda a, b: False)):
        return found | {"wrong": train("min", plan=path)}


def on_rank(rank: int, patch: Any) -> contextlib.AbstractContextManager[Any]:
    return patch if distributed.get_rank() == rank else contextlib.nullcontext()


def one_cannot() -> dict[str, Any]:
    with on_rank(1, mock.patch("lightning_memopt.session.tiling.why_not", lambda: "the native engine is not there")):
        return exact()


def infeasible() -> Any:
    """The budget of rank 1 is too small for any plan, in tiles too."""
    return train("1GiB" if rank() == 0 else 3_000_000, on_exceed="raise")


SIZES = 4
"""How many sizes are tried."""


def fewer_sizes() -> dict[str, Any]:
    """The smallest tiles give other bits on rank 1, so that all ranks compare once more."""
    gives = Proof._gives

    def fewer(self: Any, key: str, at: int, compare: Any) -> bool:
        return (at > 0 or len(self.rows) < SIZES) and gives(self, key, at, compare)

    with on_rank(1, mock.patch.object(Proof, "_gives", fewer)):
        return exact()


def raises() -> Any:
    """Rank 1 fails when it is to say what it knows."""

    def fail(*_: Any) -> Any:
        raise ValueError("no head")

    with on_rank(1, mock.patch.object(Tiling, "_shown", fail)):
        return train("min")


def rank() -> int:
    return distributed.get_rank()


CASES: dict[str, Callable[[], Any]] = {
    "default": exact,
    "inner": lambda: exact(inner=True, profile_steps=1),
    "accumulates": lambda: exact(accumulate=2),
    "unused": lambda: exact(make=Sometimes, ddp={"find_unused_parameters": True}),
    "static": lambda: exact(ddp={"static_graph": True}),
    "views": lambda: exact(ddp={"gradient_as_bucket_view": True}),
    "early": lambda: exact(optimizer_in_backward="auto"),
    "metric": lambda: exact(metric=lambda i: rank() == 0),
    "late_metric": lambda: exact(metric=lambda i: rank() == 0 and i > 6),
    "budget": in_budget,
    "one_needs": lambda: in_budget(tokens=lambda i: TOKENS if rank() else TOKENS // 2),
    "given": given,
    "other_tokens": lambda: exact(tokens=lambda i: TOKENS - 16 * rank()),
    "other_once": lambda: exact(tokens=lambda i: TOKENS - 16 * (rank() == 1 and i == 2), steps=STEPS + 2),
    "all_differ": lambda: exact(tokens=lambda i: TOKENS - 16 * (i * (1 + rank()) % 3), steps=STEPS + 6),
    "one_cannot": one_cannot,
    "off_on_one": lambda: exact(tile="exact" if rank() == 0 else "off"),
    "fewer_sizes": fewer_sizes,
    "joined": lambda: exact(joined=True, steps=STEPS + 2 * rank()),
    "sharded": lambda: exact(wrap=sharded()),
    "sharded_tied": lambda: exact(wrap=sharded(), make=Tied),
    "sharded_held": lambda: exact(wrap=sharded(), holds=True),
    "sharded_accumulates": lambda: exact(wrap=sharded(), accumulate=2),
    "sharded_apart": lambda: exact(wrap=sharded(head=True)),
    "sharded_leaves": lambda: exact(wrap=sharded(), before=proves_where_weights_leave),
    "sharded_stays_held": lambda: exact(wrap=sharded(head=False), holds=True),
    "sharded_changes": lambda: exact(wrap=sharded(), before=freed_from_now_on, steps=STEPS + 2),
    "sharded_budget": lambda: in_budget(wrap=sharded()),
    "sharded_late_metric": lambda: exact(wrap=sharded(), metric=lambda i: rank() == 0 and i > 6),
    "sharded_other_tokens": lambda: exact(wrap=sharded(), tokens=lambda i: TOKENS - 16 * rank()),
    "raises": raises,
    "infeasible": infeasible,
}


def member(group: str, number: int, folder: Path) -> None:
    join(folder / f"{group}.store", number, WORLD, PATIENT_SECONDS)
    outcome: dict[str, Any] = {}
    for name in group.split(","):
        began = time.monotonic()
        try:
            outcome[name] = CASES[name]()
        except Exception as error:
            outcome[name] = {"error": f"{type(error).__name__}: {error}"}
        outcome[name]["seconds"] = time.monotonic() - began
    (folder / f"{group}.{number}.json").write_text(json.dumps(outcome))
    os._exit(0)  # a group in which a rank has failed cannot be ended in order


if __name__ == "__main__":
    times.current = OfOps()
    members = [(group, rank, Path(sys.argv[1])) for group in sys.argv[2:] for rank in range(WORLD)]
    sys.exit(failed(forked(member, members, seconds=300)))
