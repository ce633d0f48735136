"""An op of torch may have a kernel in Python. What the kernel enters sees the kernel's ops, in a planned step, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt import optimize
from tests.cpu.native.test_interrupts import X, made


class Counting(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = made()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x)
        return loss + torch.special.i0(loss.detach())


def test_a_mode_that_a_kernel_enters_sees_its_ops_in_every_step() -> None:
    seen: list[str] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        with Counting(seen):
            return x.clone().add(1)

    model, library = Model(), torch.library.Library("aten", "IMPL")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    library.impl("special_i0", kernel, "CPU", allow_override=True)
    try:
        with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False):
            for _ in range(6):
                seen.clear()
                model(X).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert seen == ["aten.clone.default", "aten.add.Tensor"]
    finally:
        library._destroy()
