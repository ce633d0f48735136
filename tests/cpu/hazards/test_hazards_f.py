"""Users' own optimizers in backward, and sparse gradients: what a rebuild reads may change before it runs (D5, D7, F)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.errors import ModifiedError
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.models import BATCHES, Body, data, made, squares

QUIET: dict[str, Any] = dict(budget="min", profile_steps=1, verbose=False)


def in_backward(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """An optimizer for every parameter, that steps as soon as its gradient is there."""
    optimizers = {p: make([p], lr=1e-2) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())


class Reused(Body):
    """The last weight is also read, detached, by the first layers, whose backward comes after its update."""

    def between(self, h: Tensor, i: int) -> Tensor:
        return h * torch.tanh(self.layers[-1].weight.detach().mean() + h) if i == 0 else h


def run(factory: Callable[[], nn.Module], make: Callable[..., torch.optim.Optimizer], attach: bool) -> list[Tensor]:
    model = made(factory)
    optimizers = in_backward(model, make)
    with optimize(model, optimizers, **QUIET) if attach else contextlib.nullcontext() as found:
        torch.manual_seed(3)
        for batch in BATCHES:
            squares(model, batch).backward()
        if found is not None:
            assert found.plan is not None and found.plan.predicted.rebuilt_ops > 0
    return [p.detach().clone() for p in model.parameters()]


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, foreach=False),
    "sgd foreach": lambda p, lr: torch.optim.SGD(p, lr=lr, foreach=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, foreach=False),
    "adam fused": lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_f_updates_in_backward(name: str) -> None:
    """EXACT: each parameter is updated as soon as its gradient is there; no rebuild after it reads it."""
    plain, found = (run(Body, OPTIMIZERS[name], attach) for attach in (False, True))
    assert all(map(same_bits, plain, found))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_d5_weight_updated_before_a_rebuild_reads_it(name: str) -> None:
    """EXACT or REFUSE: a rebuild that would start from a weight that was updated meanwhile is refused as autograd would."""
    plain = run(Reused, OPTIMIZERS[name], False)
    try:
        found = run(Reused, OPTIMIZERS[name], True)
    except ModifiedError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert all(map(same_bits, plain, found))


def test_f_a_checkpoint_runs_modules_again_after_an_update() -> None:
    """EXACT: the step ends after its backward, not where the user's checkpoint calls a module in the middle of it."""

    class Checkpointed(Body):
        def between(self, h: Tensor, i: int) -> Tensor:
            return checkpoint(self.layers[i], h, use_reentrant=False) if i == 1 else h

    model = made(Checkpointed)
    optimizers = in_backward(model, torch.optim.SGD)
    with optimize(model, optimizers, **QUIET) as found:
        for batch in BATCHES[:2]:
            squares(model, batch).backward()
        graph = found.status().graph
    assert graph is not None and graph.saves and all(save.unpacked_at for save in graph.saves)
    plain, ours = (run(Checkpointed, torch.optim.SGD, attach) for attach in (False, True))
    assert all(map(same_bits, plain, ours))


def test_fused_update_between_forward_and_backward() -> None:
    """REFUSE: fused kernels count no versions, and autograd lets that pass; a rebuild would start from the updated weights."""
    model = made(Body)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    with optimize(model, optimizer, **QUIET, verify=False) as found:
        for batch in BATCHES:
            squares(model, batch).backward()
            optimizer.step()
        assert found.plan is not None and found.plan.predicted.rebuilt_ops > 0
        loss = squares(model, BATCHES[0])
        optimizer.step()
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_d7_sparse_gradients(make: Any) -> None:
    """EXACT: an embedding with sparse gradients, beside layers that have dense ones."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(32, 16, sparse=True), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.embed(x))

    def loop(attach: bool) -> list[Tensor]:
        model = made(Sparse)
        optimizers = [make(model.embed.parameters(), lr=1e-2), torch.optim.Adam(model.body.parameters(), lr=1e-2)]
        with optimize(model, optimizers, **QUIET) if attach else contextlib.nullcontext() as found:
            torch.manual_seed(3)
            for i in range(5):
                words = (data(64, seed=i).abs() * 10).long() % 32
                model(words).square().sum().backward()
                assert model.embed.weight.grad.is_sparse
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert found is None or found.plan.predicted.rebuilt_ops > 0
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(same_bits, loop(False), loop(True)))
