"""A plain loop whose `at(step)` is called before every step; what it does, the caller says."""

from __future__ import annotations

import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import loader, loss_of, network

STEPS = 6


def killed_at_four(step: int) -> None:
    """The last rank is killed, after all have said which process they are."""
    rank = os.environ["RANK"]
    if step == 0:
        with open(f"{sys.argv[1]}/{rank}.pid", "w") as file:
            file.write(str(os.getpid()))
    if step == 4 and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    at = getattr(sys, "interrupted_at", killed_at_four)
    accelerator = Accelerator()
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(16 * STEPS, 8))
    for step, batch in enumerate(data):
        at(step)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
