"""One budget kept in two ways: by rebuilding saved tensors, and by parking them on a disk until backward."""

from __future__ import annotations

import torch

from lightning_memopt import optimize

from .plain_loop import batches, build, step


def train(offload: str) -> None:
    """Ten steps within 7 MiB, and the run's table; `offload` is "none" or "disk"."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    with optimize(model, optimizer, budget="7MiB", offload=offload, verbose=False) as run:
        for batch in batches(10):
            step(model, optimizer, batch)
    print(run.report())


if __name__ == "__main__":
    train("none")
    train("disk")  # "disk:/fast/nvme" names the directory
