"""Loops that train with and without the planned pool, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import pool
from lightning_memopt.runtime.pool import PoolStatus
from tests.cpu.lib.loops import QUIET

ROWS, WIDTH, CLASSES = 64, 32, 10
F = nn.functional


def classifier() -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*first, nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES))


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> Tensor:
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


Step = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


@contextmanager
def training(in_pool: bool, model: nn.Module | None = None, **options: Any) -> Iterator[tuple[Run, nn.Module, Any]]:
    """A run with SGD with momentum: (the run, its model, its optimizer)."""
    model = classifier() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(1)
    with optimize(model, optimizer, **(QUIET | {"budget": "90%", "pool": "planned" if in_pool else None} | options)) as run:
        yield run, model, optimizer


def trained(
    in_pool: bool, step: Step = plain_step, steps: int = 10, model: Callable[[], nn.Module] = classifier, **options: Any
) -> tuple[list[Tensor], PoolStatus | None]:
    """(weights, buffers and the generator at the end; the pool's status at the end, with its last step)."""
    with training(in_pool, model(), **options) as (run, module, optimizer):
        for i in range(steps):
            step(module, optimizer, i)
        run.session.pool.rests()  # the last step is over
        status = run.status().pool
    return [t.detach().clone() for t in module.state_dict().values()] + [torch.get_rng_state()], status


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def both(step: Step = plain_step, **options: Any) -> PoolStatus:
    """Train with and without the pool: the bits are equal. Returns the pool's status."""
    plain, none = trained(False, step, **options)
    pooled, status = trained(True, step, **options)
    assert none is None and status is not None
    assert same(plain, pooled)
    return status


def as_planned(status: PoolStatus) -> None:
    """Steps were served from the arena, and every request of every step came as planned. After the last step no batch is made,
    of two tensors."""
    assert status.reason is None and status.addresses is not None
    assert status.steps > 0 and status.deviating == 0
    assert status.total.fallen == 0 and status.total.skipped == status.last.skipped <= 2
    assert 0 <= status.steps * status.addresses.planned - status.total.served <= status.last.skipped


def arenas_nbytes() -> int:
    """Bytes of all arenas of the process."""
    native = pool()
    assert native is not None
    return native.arenas_nbytes()[0]
