"""The largest batch size that fits a budget, without a plan and with one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memopt import find_max_batch_size

from .plain_loop import WIDTH, build, step


def batch_of(size: int) -> Tensor:
    """A batch of `size` rows, `[size, WIDTH]`."""
    return torch.randn(size, WIDTH)


def main() -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    for planned in (False, True):
        found = find_max_batch_size(
            lambda batch: step(model, optimizer, batch), batch_of, model, optimizer, budget="20MiB", planned=planned
        )
        print(f"{'with a plan' if planned else 'as it is'}: {found.size} rows")


if __name__ == "__main__":
    main()
