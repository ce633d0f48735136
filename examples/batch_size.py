"""The largest batch size that fits a budget, without a plan and with one."""

from __future__ import annotations

import torch

from lightning_memopt import find_max_batch_size, optimize

from .plain_loop import Batch, batches, build, step

BUDGET = "10MiB"


def batch_of(size: int) -> Batch:
    """A batch of `size` digits."""
    return next(batches(1, size))


def main() -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    for planned in (False, True):
        largest = find_max_batch_size(
            lambda batch: step(model, optimizer, batch), batch_of, model, optimizer, budget=BUDGET, planned=planned
        )
        print(f"{'with a plan' if planned else 'as it is'}: {largest.size} rows")
    with optimize(model, optimizer, budget=BUDGET, verbose=False) as run:
        batch = batch_of(largest.size)  # of two at a time the search does not know
        for _ in range(6):
            step(model, optimizer, batch)
    print(run.report())


if __name__ == "__main__":
    main()
