"""FSDP2 within a budget for each process: `torchrun --nproc_per_node 2 examples/fsdp2_torchrun.py`.

The blocks of the model of `plain_loop` are sharded by PyTorch's `fully_shard`. `optimize` gets the sharded model.
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from examples.plain_loop import build, digits
from lightning_memopt import optimize


def sharded() -> nn.Module:
    """The model, each block and the rest of it a unit: its weights are gathered only while it runs."""
    model = build()
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model


def train(budget: str | None, steps: int = 8) -> tuple[list[float], str]:
    """The losses of this process, and the run's table; without a budget the plain training."""
    images, labels = digits()
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(distributed.get_rank())  # other digits in every process
    losses = []
    with contextlib.ExitStack() as stack:
        run = None if budget is None else stack.enter_context(optimize(model, optimizer, budget=budget))
        for _ in range(steps):
            rows = torch.randint(len(images), (512,), generator=draw)
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, "" if run is None else run.report()


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    plain, _ = train(None)
    planned, table = train("min")
    if distributed.get_rank() == 0:
        print(table)
        print("losses identical to plain FSDP2's:", plain == planned)
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("Start this with torchrun --nproc_per_node 2 examples/fsdp2_torchrun.py")
    main()
