"""Code that trains through methods and single modules of a model: one forward from the first call to the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt import optimize
from lightning_memopt.record import calls
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import (
    QUIET,
    Batch,
    Small,
    agrees,
    batches,
    body,
    loss_of,
    seeded,
    sgd,
    small,
    through_modules,
    train,
)

Loss = Callable[[Any, Batch], Tensor]


def entered(model: nn.Module) -> bool:
    """Whether calls of the model's single modules are watched."""
    return any(id(module) in calls._entries for module in model.modules())


def through_forward(model: Small, batch: Batch) -> Tensor:
    return F.cross_entropy(model.forward(batch[0]).flatten(0, 1), batch[1].flatten())


def in_chunks(model: Small, batch: Batch) -> Tensor:
    """The weight of the head, not the head."""
    hidden, targets = body(model, batch[0]).flatten(0, 1), batch[1].flatten()
    parts = zip(hidden.chunk(4), targets.chunk(4), strict=True)
    losses = [F.cross_entropy(F.linear(h, model.head.weight), y, reduction="sum") for h, y in parts]
    return torch.stack(losses).sum() / len(targets)


def with_parts_without_gradients(model: Small, batch: Batch) -> Tensor:
    loss = through_modules(model, batch)
    with torch.no_grad():
        wanted = body(model, batch[0].roll(1, 0)).mean(-1)
    return loss + (model.embed(batch[0]).mean(-1) - wanted).square().mean()


def model_after_module(model: Small, batch: Batch) -> Tensor:
    seen = body(model, batch[1])
    return loss_of(model, batch) + 0.1 * seen.square().mean()


def with_gradients_inside(model: Small, batch: Batch) -> Tensor:
    h = model.embed(batch[0])
    for layer in model.layers:
        h = F.silu(layer(h))
    (slope,) = torch.autograd.grad(h.square().sum(), [model.embed.weight], create_graph=True)
    return F.cross_entropy(model.head(h).flatten(0, 1), batch[1].flatten()) + slope.square().mean()


def with_a_detached_part(model: Small, batch: Batch) -> Tensor:
    """Autograd lets go of all that the first part saved, and the forward goes on from its result."""
    found = model.norm(model.embed(batch[0])).detach()
    for layer in model.layers:
        found = found + F.gelu(layer(found))
    return F.cross_entropy(model.head(found).flatten(0, 1), batch[1].flatten())


def under_modes_and_hooks_that_end(model: Small, batch: Batch) -> Tensor:
    with FlopCounterMode(display=False):
        h = model.norm(model.embed(batch[0]))
    with save_on_cpu():
        h = F.gelu(model.layers[0](h))
    for layer in model.layers[1:]:
        h = h + F.gelu(layer(h))
    h = h + torch.func.vmap(torch.sin)(h)
    _, slope = torch.func.jvp(torch.cos, (h.detach(),), (h.detach(),))
    return F.cross_entropy(model.head(h * slope).flatten(0, 1), batch[1].flatten())


LOSSES: list[Loss] = [
    through_modules,
    through_forward,
    in_chunks,
    with_parts_without_gradients,
    model_after_module,
    with_gradients_inside,
    with_a_detached_part,
    under_modes_and_hooks_that_end,
]


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_one_plan_for_a_step_of_several_calls(loss: Loss) -> None:
    """The plain bits, a plan that rebuilds, one signature, no deviation; a step takes what was predicted."""
    run = agrees(lambda m, o: train(m, o, batches(8), loss))
    found, status = state_of(run), run.status()
    assert isinstance(found, Running) and len(states_of(run)) == 1 and not found.drift.deviated
    assert status.plan is not None and status.plan.predicted.rebuilt_ops > 0 and status.predicted_peak_nbytes is not None
    if status.measured_peak_nbytes is not None:
        assert status.measured_peak_nbytes == pytest.approx(status.predicted_peak_nbytes, rel=0.01)


class Fields(nn.ModuleList):
    """Two networks of one optimizer, and no forward."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)) for _ in "ab"
        )


def on_noise(loss: Callable[[Any, Tensor], Tensor], width: int, steps: int = 8) -> Callable[[Any, Any], list[Tensor]]:
    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            losses.append(loss(model, torch.randn(256, width)))
            losses[-1].backward()
            losses[-1] = losses[-1].detach()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return use


@pytest.mark.filterwarnings("error:MemOpt")
def test_two_networks_in_a_list() -> None:
    def loss(networks: nn.ModuleList, x: Tensor) -> Tensor:
        coarse = networks[0](x)
        with torch.no_grad():
            finer = x + 0.1 * coarse[:, :3].sigmoid()
        return coarse.square().mean() + (networks[1](finer).sin() - coarse).square().mean()

    run = agrees(on_noise(loss, 3), lambda: seeded(Fields))
    assert len(states_of(run)) == 1 and run.plan is not None and run.plan.predicted.rebuilt_ops > 0


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 3), nn.Linear(64, 1)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "with gradients"])
def test_moves_of_an_agent_between_its_steps(gradients: bool) -> None:
    """The step is planned without the moves, even if they record gradients that nobody asks for: each such forward is given
    up.
    """

    def loss(agent: Agent, x: Tensor) -> Tensor:
        for move in x[:4]:
            with torch.set_grad_enabled(gradients):
                agent.act(move[None])
        chances, value = agent.act(x)
        return value.square().mean() - chances.max(-1).values.mean()

    run = agrees(on_noise(loss, 8), lambda: seeded(Agent))
    assert isinstance(state_of(run), Running) and not state_of(run).drift.deviated
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


@pytest.mark.filterwarnings("error:MemOpt")
def test_gradients_that_are_cached() -> None:
    """All chunks without gradients, a loss over all of them, and a forward and a backward for each chunk."""

    def use(agent: Agent, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(8):
            chunks = torch.randn(512, 8).chunk(4)
            with torch.no_grad():
                seen = torch.cat([agent.act(chunk)[0] for chunk in chunks])
            seen.requires_grad_()
            loss = (seen @ seen.T).logsumexp(1).mean()
            loss.backward()
            for chunk, gradient in zip(chunks, seen.grad.chunk(4), strict=True):  # type: ignore[union-attr]
                (agent.act(chunk)[0] * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    run = agrees(use, lambda: seeded(Agent))
    assert len(states_of(run)) == 1 and not state_of(run).drift.deviated
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("inside", [True, False], ids=["in a module", "behind it"])
def test_a_batch_that_raises(inside: bool) -> None:
    """In a module, or in the loop's own code after it. The next batch is a forward of its own, and the plan stays."""

    class Fragile(nn.Linear):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.broken:
                raise ValueError("broken")
            return out

    def build() -> nn.Module:
        model = small()
        model.head = Fragile(32, 24, bias=False)
        return model

    def use(model: Small, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for i in range(12):
            batch = torch.randint(24, (48, 8)), torch.randint(24, (48, 8))  # drawn in the loop: after a batch that raised, too
            Fragile.broken = inside and i in (5, 8)
            try:
                loss = through_modules(model, batch)
                if i in (5, 8):
                    raise ValueError("broken")
            except ValueError:
                loss = None
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            del loss
        return losses

    run = agrees(use, build)
    assert isinstance(state_of(run), Running) and not state_of(run).drift.deviated
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


@pytest.mark.filterwarnings("error:MemOpt")
def test_evaluation_by_methods_between_the_steps() -> None:
    def use(model: Small, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        seen = []
        for i, batch in enumerate(batches(9)):
            loss = through_modules(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 2:
                model.eval()
                with torch.no_grad():
                    seen += [through_modules(model, other) for other in batches(6, seed=5)]
                model.train()
        return seen

    run = agrees(use)
    assert len(states_of(run)) == 1 and not state_of(run).drift.deviated
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


def test_modules_that_take_turns() -> None:
    """Adversaries in one module: both turns begin with the same module and have a plan each."""

    class Adversaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16))
            self.critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.critic, model.generator)]

    def use(model: Any, pair: list[torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(10):
            made = model.generator(torch.randn(128, 8)).detach()
            loss = model.critic(made).mean() - model.critic(torch.randn(128, 16)).mean()
            model.zero_grad()
            loss.backward()
            pair[0].step()
            other = -model.critic(model.generator(torch.randn(128, 8))).mean()
            model.zero_grad()
            other.backward()
            pair[1].step()
            losses += [loss.detach(), other.detach()]
        return losses

    run = agrees(use, lambda: seeded(Adversaries), both)
    found = list(states_of(run).values())
    assert len(found) == 2 and all(isinstance(s, Running) and s.lender is None and not s.drift.deviated for s in found)


# -- the model itself is called ------------------------------------------------------------------------------------


def test_single_modules_are_not_watched_where_the_model_is_called() -> None:
    """They are no longer watched after the first update, and are watched again after a step without a call of the model."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        assert entered(model)
        train(model, optimizer, batches(1))
        assert not entered(model)
        train(model, optimizer, batches(5))
        (plan,) = states_of(run).values()
        assert isinstance(plan, Running) and not entered(model)
        train(model, optimizer, batches(1), through_modules)
        assert entered(model)
        train(model, optimizer, batches(5), through_modules)
        assert len(states_of(run)) == 2 and entered(model)
        assert all(isinstance(s, Running) for s in states_of(run).values())
        train(model, optimizer, batches(1))
        assert not entered(model) and plan in states_of(run).values()
    assert not calls._entries


def test_modules_that_are_called_beside_the_model_are_no_forwards() -> None:
    """In the first step they are watched, too. After a call of the model they belong to its step, and change no plan."""

    def loss(model: Small, batch: Batch) -> Tensor:
        return loss_of(model, batch) + 0.1 * body(model, batch[1]).square().mean()

    run = agrees(lambda m, o: train(m, o, batches(8), loss))
    (signature,) = states_of(run)
    assert signature[0] == 0 and run.plan is not None
