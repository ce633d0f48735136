"""Memory that is written, or resized, after ops of the forward have read it: what trains plainly trains here, bit by bit.

The input that is scaled in place after the forward, a static buffer that is refilled, a buffer that the next forward updates
before one backward for both, storages that are emptied when they are not needed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import ModifiedError, RebuildMismatchError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.runtime.engine import rebuild
from lightning_memopt.session.observe.observation import Observation
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.models import Body, X, assert_drops, data, made, sgd, squares

Loss = Callable[[nn.Module, Tensor], Tensor]
SIZE = 256


class Scaled(Body):
    """Saves nothing of its input, but rebuilds would start from it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 - 0.5)


class Averaged(Body):
    """A running mean that each forward updates in place, and that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return super().forward(x - self.mean)


class Embedded(nn.Module):
    """`max_norm` scales rows of the weight in place in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(32, 16, max_norm=1.0), Body()

    def forward(self, x: Tensor) -> Tensor:
        words = ((x[:, 0].abs() * 1000).long()) % 32
        return self.body((self.embed(words) * 3).exp())


class Exposing(Body):
    """Keeps a result that autograd saves where the loop gets at it."""

    def between(self, h: Tensor, i: int) -> Tensor:
        if i == 0:
            self.seen: Tensor | None = h
        return h


class Gathered(Body):
    """A weight whose storage is filled for its use and emptied after it, as sharded training does."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = torch.randn(16, generator=torch.Generator().manual_seed(1))
        self.full = torch.empty(16)
        self.full.untyped_storage().resize_(0)

    def gather(self) -> None:
        self.full.untyped_storage().resize_(64)
        self.full.data.copy_(self.shard)

    def forward(self, x: Tensor) -> Tensor:
        self.gather()
        h = (x * self.full).exp()
        self.full.untyped_storage().resize_(0)
        return super().forward(h.clamp(max=2))


class Emptied(Body):
    """An activation that nobody saved is emptied after its last use."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        shifted = h + 1
        h.untyped_storage().resize_(0)
        return super().forward(shifted)


def scaled_after(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    loss = squares(model, x)
    x.div_(255)
    return loss


def refilled(model: nn.Module, x: Tensor) -> Tensor:
    static: Tensor = model.__dict__.setdefault("static", torch.zeros_like(x))
    static.copy_(x)
    loss = squares(model, static)
    static.copy_(x + 1)
    return loss


def refilled_between_steps(model: nn.Module, x: Tensor) -> Tensor:
    static: Tensor = model.__dict__.setdefault("static", torch.zeros_like(x))
    static.copy_(x)
    return squares(model, static)


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + model(x.flip(0)).sin().sum()


def buffer_scaled(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    model.mean.mul_(0.5)
    return loss


def buffer_data_scaled(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    model.mean.data.mul_(0.5)
    return loss


def saved_data_scaled(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    model.seen.data.mul_(0.5)
    model.seen = None
    return loss


def input_emptied(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    loss = squares(model, x)
    x.untyped_storage().resize_(0)
    return loss


def gathered_again(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    model.gather()
    return loss


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "input scaled in place": (Scaled, scaled_after),
    "static input refilled before backward": (Scaled, refilled),
    "static input refilled between steps": (Scaled, refilled_between_steps),
    "running mean, two forwards": (Averaged, two_forwards),
    "renormed embedding, two forwards": (Embedded, two_forwards),
    "buffer scaled in place": (Averaged, buffer_scaled),
    "buffer scaled where no version counts": (Averaged, buffer_data_scaled),
    "saved tensor scaled where no version counts": (Exposing, saved_data_scaled),
    "input emptied": (Scaled, input_emptied),
    "activation emptied": (Emptied, squares),
    "weight gathered and emptied": (Gathered, gathered_again),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int = 5) -> list[Tensor]:
    """Losses, gradients of every step, and what the generator draws next."""
    found: list[Tensor] = []
    torch.manual_seed(7)
    for i in range(steps):
        value = loss(model, data(SIZE, 16, seed=i))
        value.backward()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, torch.rand(3)]


def agrees(factory: Callable[[], nn.Module], loss: Loss, **options: Any) -> Run:
    """The loop plainly and inside `optimize`, without a warning: the same bits."""
    plain = made(factory)
    expected = train(plain, sgd(plain), loss)
    model = made(factory)
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimize(model, optimizer, **({"verbose": False} | options)) as run:
            found = train(model, optimizer, loss)
    assert "resize_" not in vars(torch.UntypedStorage), "nothing is left of what watches sizes"
    assert len(expected) == len(found) and all(map(same_bits, expected, found))
    for name, value in plain.state_dict().items():
        assert same_bits(model.state_dict()[name], value), name
    return run


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_trains_as_plainly(name: str, steps: int) -> None:
    """EXACT: with room for everything, at the smallest plan, and while tensors are evicted."""
    smallest = agrees(*LOOPS[name], budget="min", profile_steps=steps)
    assert_drops(smallest)
    if steps == 1:
        assert not agrees(*LOOPS[name], budget="99%", profile_steps=steps).plan.predicted.rebuilt_ops
    else:
        frontier = smallest.session.status().frontier
        between = (frontier.smallest_nbytes + frontier.unmodified_peak_nbytes) // 2
        assert_drops(agrees(*LOOPS[name], budget=between, profile_steps=steps))


class Lying:
    """Makes an operator give other bits when it runs again, not in the forward."""

    def __init__(self, name: str) -> None:
        self.name, self.run = name, rebuild.run

    def __call__(self, call: Any, versions: Any, survives: Any) -> None:
        self.run(call, versions, survives)
        if self.name in call.func.name():
            for _, id in call.made:
                versions[id].holding.rebuilt(versions[id].holding.value.add_(1e-3))


@contextlib.contextmanager
def lying(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("rebuild", "planned"):
            patch.setattr(f"lightning_memopt.runtime.engine.{module}.run", Lying(name))
        yield


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_op_that_gives_other_bits_is_kept_in_all_steps_that_follow(steps: int) -> None:
    """EXACT: seen once, in the first observed step; later observed steps, and those of another batch size, know of it."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for i, size in enumerate([SIZE] * 5 + [SIZE * 2] * 4):
            loss = squares(model, data(size, 16, seed=i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    plain = made(Body)
    expected = loop(plain, sgd(plain))
    model = made(Body)
    optimizer = sgd(model)
    with lying("tanh"), pytest.warns(UserWarning, match="tanh again gave other bits") as told:
        with optimize(model, optimizer, verbose=False, budget="min", profile_steps=steps) as run:
            found = loop(model, optimizer)
            plans = [state.program for state in states_of(run).values()]
    assert all(map(same_bits, expected, found))
    assert len(plans) == 2 and all(program.schedule.rebuilt for program in plans)
    assert not any("tanh" in program.names[op] for program in plans for op in program.schedule.rebuilt)
    assert sum("other bits" in str(w.message) for w in told) == 1


def test_an_op_that_begins_to_give_other_bits_is_an_error_in_a_planned_step() -> None:
    """REFUSE: it was the same bits while steps were observed, and the plan depends on that."""
    model = made(Body)
    optimizer = sgd(model)
    with optimize(model, optimizer, verbose=False, budget="min", profile_steps=2) as run:
        train(model, optimizer, squares, steps=2)
        assert_drops(run)
        with lying("tanh"), pytest.raises(RebuildMismatchError, match="Nothing has been updated"):
            train(model, optimizer, squares, steps=1)


class Meddled(Scaled):
    """Reads a buffer that the loop may change after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.shift)


def meddling_loop(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, catch: bool) -> list[Tensor]:
    """From step `first` on, every other step changes the buffer after its forward. Steps that raise do not update."""
    found = []
    for i in range(first + 6):
        loss = squares(model, data(SIZE, 16, seed=i))
        if i >= first and (i - first) % 2 == 0:
            model.shift.mul_(0.9)
        raised = i == first and catch
        with pytest.raises(ModifiedError) if raised else contextlib.nullcontext():
            loss.backward()
        if not raised:
            optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("steps", [1, 2])
def test_first_changed_in_a_planned_step(steps: int) -> None:
    """REFUSE once, by name, and EXACT from then on: also where the next step, which is observed, does not change it."""
    model = made(Meddled)
    optimizer = sgd(model)
    smallest = {"budget": "min", "max_slowdown": math.inf}
    with optimize(model, optimizer, verbose=False, profile_steps=steps, **smallest) as run:
        found = meddling_loop(model, optimizer, first=4, catch=True)
        assert_drops(run)
    plain = made(Meddled)
    expected = []
    optimizer = sgd(plain)
    for i in range(10):
        loss = squares(plain, data(SIZE, 16, seed=i))
        if i >= 4 and i % 2 == 0:
            plain.shift.mul_(0.9)
        if i != 4:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    assert all(map(same_bits, expected, found))
    for name, value in plain.state_dict().items():
        assert same_bits(model.state_dict()[name], value), name


@pytest.mark.parametrize("name", LOOPS)
def test_what_was_evicted_already_is_rebuilt_from_the_bytes_that_were_read(name: str) -> None:
    """EXACT: one observed step in which everything that may be evicted is, in every forward, before the write comes."""
    factory, loss = LOOPS[name]
    plain, model = made(factory), made(factory)
    loss(plain, X).backward()
    observation = Observation(model, [], torch.device("cpu"), limit_nbytes=0, verify=True, meter=False)
    forward, engines = model.forward, []

    def observed(x: Tensor) -> Tensor:
        with observation.begin_round((x,)) as recording:
            engines.append(recording.engine)
            return forward(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", observed)
        value = loss(model, X)
        observation.forward_ended()
        value.backward()
    graph = observation.finish()
    assert graph is not None and all(engine.evictions > 0 for engine in engines)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name
    lost = engines[-1].starts.lost
    assert bool(lost) is (loss not in (refilled_between_steps, squares)), "what was written over is not run again by a plan"
    assert not any(graph.ops[i].recomputable for i in lost)


class Parts(Body):
    """A part without a backward, which the loop holds until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.aside(x)
        return super().forward(x + self.held.detach().mean()) + 0 * self.held.detach().sum()


class Trunk(nn.Module):
    """The same, after a trunk whose backward the loss runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.aside = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk:
            x = layer(x).tanh()
        self.held = self.aside(x)
        return x


@pytest.mark.parametrize("factory", [Parts, Trunk])
def test_a_part_without_a_backward_is_held_at_the_update(factory: Callable[[], nn.Module]) -> None:
    """EXACT. The part stays in memory. What is dropped before the update is still rebuilt."""
    run = agrees(factory, squares, budget="min")
    assert_drops(run)
    frontier = run.session.status().frontier
    assert frontier.smallest_nbytes < 0.9 * frontier.unmodified_peak_nbytes


def test_a_part_that_is_held_can_be_read_after_the_update() -> None:
    """Its backward may run if it needs no weight: what autograd saved still has the bytes of the forward."""

    def train_on(model: Trunk, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for i in range(6):
            h = model(data(SIZE, 16, seed=i))
            grown = h.exp().square()
            h.square().mean().backward(retain_graph=False)
            optimizer.step()
            optimizer.zero_grad()
            if i > 3:
                found.append(torch.autograd.grad(grown.sum(), h)[0])
        return found

    plain, model = made(Trunk), made(Trunk)
    expected = train_on(plain, sgd(plain))
    with optimize(model, optimizer := sgd(model), budget="min", verbose=False) as run:
        found = train_on(model, optimizer)
    assert_drops(run)
    assert all(map(same_bits, expected, found))
