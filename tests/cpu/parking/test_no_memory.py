"""An op of an observed step for which the device has no memory while weights are there: they leave, and the op runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from lightning_memopt import optimize, register_op
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.cpu.lib.said import listening
from tests.cpu.parking.test_weights import known_times

pytestmark = pytest.mark.usefixtures(known_times.__name__)
WIDTH, BLOCKS = 64, 6
limited: dict[str, Any] = {"weights": [], "away": 0}
"""Frozen weights, and how many of them must be away for an op of `Hungry` to have room."""


def _needs_room() -> None:
    if sum(map(is_away, limited["weights"])) < limited["away"]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@torch.library.custom_op("memopt_test::hungry_forward", mutates_args=())
def hungry_forward(x: Tensor) -> Tensor:
    _needs_room()
    return x * 2


@torch.library.custom_op("memopt_test::hungry_backward", mutates_args=())
def hungry_backward(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("memopt_test::hungry_gradient", mutates_args=())
def hungry_gradient(grad: Tensor) -> Tensor:
    _needs_room()
    return grad * 2


for op in (hungry_forward, hungry_backward, hungry_gradient):
    op.register_fake(torch.empty_like)
hungry_forward.register_autograd(lambda ctx, grad: grad * 2)
hungry_backward.register_autograd(lambda ctx, grad: hungry_gradient(grad))
OPS = {"forward": hungry_forward, "backward": hungry_backward, "within a block": hungry_forward}


class Block(nn.Module):
    """inner: called between two reads of its weight."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + gelu(self.frozen(self.inner(gelu(self.frozen(x)))) + self.bias)


class Model(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        inner, self.hungry = (OPS[where], torch.tanh) if where == "within a block" else (torch.tanh, OPS[where])
        self.blocks = nn.ModuleList(Block(inner if i == BLOCKS // 2 else torch.tanh) for i in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == BLOCKS // 2:
                x = self.hungry(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def pure() -> Iterator[None]:
    for name in ("hungry_forward", "hungry_backward", "hungry_gradient"):
        register_op(getattr(torch.ops.memopt_test, name).default, "pure")
    yield
    limited.update(weights=[], away=0)


def trained(where: str, budget: Any, away: int = 0, **options: Any) -> tuple[list[bytes], Any, str]:
    """Losses and gradients of some steps, the run's status, and what it said."""
    torch.manual_seed(0)
    model = Model(where)
    optimizer = torch.optim.SGD([block.bias for block in model.blocks], lr=0.1)  # type: ignore[misc]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    seen: list[bytes] = []

    def loop() -> None:
        for _ in range(6):
            loss = model(torch.randn(16, WIDTH))
            loss.backward()
            seen.extend(
                t.numpy().tobytes() for t in (loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None))
            )
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        loop()
        return seen, None, ""
    with listening() as said, optimize(model, optimizer, budget=budget, max_slowdown=1e6, **options) as run:
        limited.update(weights=frozen, away=away)
        loop()
        return seen, run.status(), said.taken()


@pytest.mark.parametrize("where", OPS)
@pytest.mark.parametrize("away", [1, 5])
def test_weights_leave_and_the_step_goes_on(where: str, away: int) -> None:
    """As many as it takes, half of those that are there at a time. Plans are as if they had been away from the beginning."""
    plain, _, _ = trained(where, None)
    usual, expected, _ = trained(where, "min", offload="disk")
    found, status, said = trained(where, "min", away, offload="disk")
    assert found == usual == plain
    assert said.count("MemOpt: an observed step has no memory left: weights leave") == 1
    assert status.phase == "planned" and len(status.plan.weights) == BLOCKS == len(expected.plan.weights)
    assert status.plan.budget_nbytes == expected.plan.budget_nbytes
    assert status.measured_peak_nbytes == expected.measured_peak_nbytes <= status.plan.budget_nbytes


@pytest.mark.parametrize("where", OPS)
def test_without_a_tier_the_error_is_the_users(where: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 GiB"):
        trained(where, "min", 1)


@pytest.mark.parametrize("where", OPS)
def test_where_no_weight_is_left_the_error_is_the_users(where: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 GiB"):
        trained(where, "min", BLOCKS + 1, offload="disk")
    assert not any(map(is_away, limited["weights"]))
