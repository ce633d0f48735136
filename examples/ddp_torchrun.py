"""DistributedDataParallel within a budget for each process: `torchrun --nproc_per_node 2 examples/ddp_torchrun.py`.

The loop is PyTorch's own. `optimize` gets the wrapped model, the one that the loop calls.
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt import optimize


def build() -> nn.Module:
    """Convolutions with BatchNorm on images `[batch, 1, 8, 8]`; the same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 24, 3, padding=1)]
    for _ in range(8):
        layers += [nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def train(budget: str | None, steps: int = 8) -> tuple[list[float], str]:
    """The losses of this process, and the run's table; without a budget the plain training."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target, dtype=torch.int64)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    draw = torch.Generator().manual_seed(distributed.get_rank())  # other digits in every process
    losses = []
    with contextlib.ExitStack() as stack:
        run = None if budget is None else stack.enter_context(optimize(model, optimizer, budget=budget))
        for _ in range(steps):
            rows = torch.randint(len(images), (256,), generator=draw)
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
    planned, table = train("16MiB")
    if distributed.get_rank() == 0:
        print(table)
        print("losses identical to plain DDP's:", plain == planned)
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("Start this with torchrun --nproc_per_node 2 examples/ddp_torchrun.py")
    main()
