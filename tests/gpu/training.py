"""A loop on the device, plain or within a budget, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_memopt import optimize


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor], budget: str | None, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """(losses and gradients of each step, then weights, buffers, and what the generator draws next; the run's status).

    batches: a step each. budget: None trains plainly.
    """
    seen: list[torch.Tensor] = []

    def loop() -> None:
        for x in batches:
            loss = model(x).square().mean()
            loss.backward()
            seen.extend(t.detach().cpu() for t in (loss, *(p.grad for p in model.parameters() if p.grad is not None)))
            optimizer.step()
            optimizer.zero_grad()

    status = None
    if budget is None:
        loop()
    else:
        with optimize(model, optimizer, budget=budget, verbose=False, **options) as run:
            loop()
        status = run.status()
        print(run.report())
    return [*seen, *(t.detach().cpu() for t in model.state_dict().values()), torch.rand(8, device="cuda").cpu()], status
