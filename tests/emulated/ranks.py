"""Two ranks with gloo between them, each on an emulated card of its own: `python -m tests.emulated.ranks FOLDER [CASE ...]`.
Rank r writes into FOLDER/r.json what each case came to, plainly and planned: hashes of the bits of every step.

gloo carries CUDA's tensors through pinned memory: it copies them on streams of its own, and back when the host has waited.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt import optimize
from tests.cpu.lib.early import counted
from tests.cpu.lib.forked import failed, forked
from tests.emulated import device

WORLD, STEPS, WORDS, WIDTH = 2, 6, 48, 128
WARMUP = 2
"""Plain steps before the others: DDP makes its buckets anew after the first one."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(functional.gelu(self.wide(self.norm(x)))))


class Language(nn.Module):
    """Embeddings, dropout, a tied head, and statistics of a BatchNorm, which DDP sends to all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.statistics, self.head = nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.statistics(x.flatten(0, 1).float()).to(x.dtype))


def ddp(**options: Any) -> Callable[[Language, int], nn.Module]:
    return lambda model, card: DistributedDataParallel(model, device_ids=[card], **options)


def fsdp2(nested: bool = True, **options: Any) -> Callable[[Language, int], nn.Module]:
    def sharded(model: Language, card: int) -> nn.Module:
        for block in model.blocks if nested else ():
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return sharded


@dataclass(frozen=True)
class Case:
    """A way to wrap the model, and a loop. `parts`: backwards of a step; DDP reduces in the last one."""

    wrapped: Callable[[Language, int], nn.Module]
    parts: int = 1
    autocast: bool = False
    updates_early: bool = False


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "DDP": Case(ddp()),
    "DDP, small buckets": Case(ddp(bucket_cap_mb=0.05)),
    "DDP, gradients are views of buckets": Case(ddp(gradient_as_bucket_view=True)),
    "DDP, autocast": Case(ddp(), autocast=True),
    "DDP, two backwards": Case(ddp(), parts=2),
    "DDP, updates in backward": Case(ddp(), updates_early=True),
    "FSDP2": Case(fsdp2()),
    "FSDP2, one unit": Case(fsdp2(nested=False)),
    "FSDP2, weights are kept": Case(fsdp2(reshard_after_forward=False)),
    "FSDP2, bfloat16": Case(fsdp2(mp_policy=BF16)),
    "FSDP2, two backwards": Case(fsdp2(), parts=2),
}


def local(t: torch.Tensor) -> torch.Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach().cpu().contiguous()


def bits(*tensors: torch.Tensor) -> str:
    """A hash of all their bits."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(local(t).view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(case: Case, card: int, planned: bool) -> dict[str, Any]:
    """Hashes of loss and gradients in each step, and of parameters, optimizer state, buffers and generators at the end."""
    torch.manual_seed(0)
    model = case.wrapped(Language().to(card), card)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5 + distributed.get_rank())
    memopt: dict[str, Any] = {"budget": "min", "profile_steps": 2, "verbose": False, "max_slowdown": float("inf")}
    memopt |= {"optimizer_in_backward": "always"} if case.updates_early else {}
    losses: list[str] = []
    gradients: list[str] = []
    with contextlib.ExitStack() as stack:
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        early = counted(stack.enter_context(pytest.MonkeyPatch.context()))
        run: Any = None
        for i in range(WARMUP + STEPS):
            if i == WARMUP and planned:
                run = stack.enter_context(optimize(model, optimizer, **memopt))
            torch.cuda.reset_peak_memory_stats()
            for part in range(case.parts):
                words = torch.randint(WORDS, (64, 48), device=card)
                last = part == case.parts - 1
                with contextlib.ExitStack() as within:
                    if isinstance(model, DistributedDataParallel) and not last:
                        within.enter_context(model.no_sync())
                    with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
                        loss = functional.cross_entropy(model(words).float(), words.roll(1, 1).flatten())
                    if run is not None and last:
                        within.enter_context(run.last_backward())
                    loss.backward()
                losses.append(bits(loss))
            if not case.updates_early:  # there is nothing to read after the backward, and reading is refused
                gradients.append(bits(*(p.grad for p in model.parameters() if p.grad is not None)))
            optimizer.step()
            optimizer.zero_grad()
            del loss, words
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        status = None if run is None else run.status()
    state = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    found: dict[str, Any] = {
        "losses": losses,
        "gradients": gradients,
        "state": bits(*state, *model.buffers(), torch.get_rng_state(), torch.cuda.get_rng_state(card)),
        "peak": peak,
        "early": len(early),
        "said": [str(w.message) for w in warned if "MemOpt" in str(w.message)],
    }
    if status is not None:
        found |= {"phase": status.phase, "deviates": status.deviates}
    if status is not None and status.plan is not None:
        found |= {"predicted": status.plan.predicted_peak_nbytes, "rebuilt": status.plan.predicted.rebuilt_ops}
    return found


def rank(number: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    torch.empty(1, device=number)
    store = distributed.FileStore(str(folder / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = {how: train(CASES[name], number, how == "planned") for how in ("plain", "again", "planned")}
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps({"cases": found, "races": device.races()}))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = [(number, Path(sys.argv[1]), sys.argv[2:] or list(CASES)) for number in range(WORLD)]
    sys.exit(failed(forked(rank, arguments)))
