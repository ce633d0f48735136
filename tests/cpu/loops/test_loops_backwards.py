"""Plain loops with several forwards or backwards a step inside `with optimize(...)`: the plain run's bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, Batch, agrees, assert_same, batches, loss_of, small, state


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)  # small: some of these losses diverge, and NaN equals nothing


def deep() -> nn.Module:
    return small(depth=6)


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards of the model, one backward."""
    one, other = (model(x).mean(1) for x in (batch[0], batch[0].flip(1)))
    loss = nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))
    loss.backward()
    return loss


def cached(model: nn.Module, batch: Batch) -> Tensor:
    """GradCache: representations without gradients, the loss of all of them, then one part after the other under the state
    of the generator that it had.
    """
    parts = batch[0].chunk(3)
    states, found = [], []
    for part in parts:
        states.append(torch.get_rng_state())
        with torch.no_grad():
            found.append(model(part).mean(1))
    whole = torch.cat(found).requires_grad_()
    loss = nn.functional.cross_entropy(whole @ whole.T, torch.arange(len(whole)))
    loss.backward()
    after = torch.get_rng_state()
    assert whole.grad is not None
    for part, before, grad in zip(parts, states, whole.grad.chunk(3), strict=True):
        torch.set_rng_state(before)
        model(part).mean(1).backward(grad)
    torch.set_rng_state(after)
    return loss


def retained(model: nn.Module, batch: Batch) -> Tensor:
    """Two losses of one graph, the first backward retains it."""
    out = model(batch[0])
    loss = nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten())
    loss.backward(retain_graph=True)
    out.square().mean().backward()
    return loss


def summed(model: nn.Module, batch: Batch) -> Tensor:
    """Three forwards whose losses are summed up."""
    loss = torch.stack([loss_of(model, batch) for _ in range(3)]).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("use", [contrastive, cached, retained, summed], ids=lambda f: f.__name__)
def test_several_forwards_and_backwards(use: Callable[[nn.Module, Batch], Tensor]) -> None:
    """Exact at the smallest plan and at a budget in between, which is kept."""

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(3)
        losses = []
        for batch in batches(6):
            losses.append(use(model, batch).detach())
            optimizer.step()
            optimizer.zero_grad()
        assert all(loss.isfinite() for loss in losses)
        return losses

    run = agrees(run_all, deep, adamw)
    frontier = run.status().frontier
    assert frontier is not None
    budget = (frontier.smallest_nbytes + frontier.unmodified_peak_nbytes) // 2 + 8192  # plus what this test holds by then
    del run  # what is alive counts
    gc.collect()
    found = state_of(agrees(run_all, deep, adamw, budget=budget))
    assert isinstance(found, Running) and found.peaks.measured_nbytes is not None and found.peaks.measured_nbytes <= budget
    assert use is retained or found.plan.predicted.rebuilt_ops > 0


@pytest.mark.parametrize("shared", [False, True])
def test_gan(shared: bool) -> None:
    """Generator and discriminator in blocks of their own; the discriminator sees detached fakes, then the generator's.

    `shared`: both backwards use the same fakes; otherwise the generator runs twice.
    """

    def run_all(g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> list[Tensor]:
        torch.manual_seed(2)
        seen = []
        for x, _ in batches(6):
            fake = g(x)
            of_d.zero_grad()
            judged = d(x).square().mean() - d(fake.detach().argmax(-1)).square().mean()
            judged.backward()
            of_d.step()
            of_g.zero_grad()
            fake = fake if shared else g(x)
            loss = nn.functional.mse_loss(fake, d(x).detach()) + fake.abs().mean()
            loss.backward()
            of_g.step()
            seen += [judged.detach(), loss.detach()]
        return seen

    def made() -> tuple[nn.Module, nn.Module, Any, Any]:
        g, d = small(0, depth=4), small(1, depth=4)
        return g, d, adamw(g), adamw(d)

    parts = made()
    plain = run_all(*parts)
    expected = [state(model) for model in parts[:2]]
    parts = made()
    one = optimize(parts[0], parts[2], budget="min", **QUIET)
    other = optimize(parts[1], parts[3], budget="min", **QUIET)
    with one as generator, other as discriminator:
        found = run_all(*parts)
        assert generator.plan is not None and discriminator.plan is not None
        assert generator.plan.predicted.rebuilt_ops > 0
    for before, model in zip(expected, parts[:2], strict=True):
        assert_same(before, state(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
