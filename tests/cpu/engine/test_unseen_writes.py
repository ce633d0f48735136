"""Bytes that change where no op is seen to write them: rebuilds start from those that the op read, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.runtime.engine.rebuild import checksum
from tests.cpu.lib.harness import assert_exact, outcome, recorded, same_bits
from tests.cpu.lib.loops import agrees, batches, step

WIDTH = 16


class Net(nn.Module):
    """Ops whose results are rebuilt, and `between`, which runs in the middle of them."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.batch = np.random.default_rng(0).random((8, WIDTH), dtype=np.float32)
        self.between = between

    def forward(self) -> Tensor:
        h = self.first(torch.from_numpy(self.batch).mul(0.5)).sin().exp()
        return self.last(self.between(self, h)).tanh()


def other_bias(model: Net, h: Tensor) -> Tensor:
    own = model.last.bias.data
    model.last.bias.data = torch.full((WIDTH,), 0.25)
    h = model.last(h).sin().exp()
    model.last.bias.data = own
    return h


def numpy_in_parameter(model: Net, h: Tensor) -> Tensor:
    h = (h * model.scale).sin().exp()
    model.scale.detach().numpy()[:] = 0.5
    return (h * model.scale).sin().exp()


def write_in_thread(model: Net, h: Tensor) -> Tensor:
    h = (h * model.scale).mul_(2)
    thread = threading.Thread(target=h.detach().add_, args=(1,))
    thread.start()
    thread.join()
    return h.sin().exp()


def shifted(model: Net, h: Tensor) -> Tensor:
    return (h + model.shift).sin().exp()


def straight(model: Net, h: Tensor) -> Tensor:
    """Ops that start directly from the memory of an array."""
    return h + torch.from_numpy(model.batch).exp().sin().exp()


def nothing(model: Net) -> None: ...


def new_buffer(model: Net) -> None:
    model.shift.data = torch.full((WIDTH,), -3.0)


def refilled(model: Net) -> None:
    model.batch[:] = 7.0


@pytest.mark.parametrize(
    "between, afterwards",
    [
        (other_bias, nothing),
        (numpy_in_parameter, nothing),
        (write_in_thread, nothing),
        (shifted, new_buffer),
        (straight, refilled),
    ],
    ids=["data of a bias", "numpy in a parameter", "another thread", "data of a buffer", "array refilled"],
)
def test_a_write_that_is_not_seen(between, afterwards) -> None:
    def step(model: nn.Module) -> Tensor:
        loss = model().square().mean()
        afterwards(model)
        return loss

    plain, rebuilt = (outcome(Net(between), step, drop=drop) for drop in (False, True))
    assert rebuilt.dropped > 0, "nothing was dropped: the test tests nothing"
    assert_exact(plain, rebuilt)


def test_draws_of_another_thread_while_masks_are_rebuilt() -> None:
    """Rebuilds draw from a generator of their own: the thread sees the numbers that the run's generator has next."""
    x = torch.rand(1 << 20, requires_grad=True)
    torch.manual_seed(0)
    with recorded(drop=True):
        loss = sum(nn.functional.dropout(x.sin(), 0.5).sin().sum() for _ in range(4))
    state = torch.get_rng_state()
    drawn: list[Tensor] = []
    begun, over = threading.Event(), threading.Event()

    def draw() -> None:
        while not over.is_set():
            drawn.append(torch.rand(2))
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    loss.backward()  # type: ignore[union-attr]
    over.set()
    thread.join()
    found = torch.get_rng_state()
    torch.set_rng_state(state)
    assert all(same_bits(torch.rand(2), numbers) for numbers in drawn)
    assert torch.equal(torch.get_rng_state(), found)


def test_a_checksum_knows_where_words_are() -> None:
    t = torch.arange(3 * 4096 * 2, dtype=torch.float32).sin()
    others = [t.flip(0), t.roll(2), t.view(2, -1).t().reshape(-1), t.clone()]
    swapped = t.view(-1, 2).clone()
    swapped[[1, 5000]] = swapped[[5000, 1]]
    square = torch.tensor([[1, 2], [2, 1]]).repeat(64, 64)
    assert checksum(t) == checksum(others.pop())
    assert all(checksum(t) != checksum(other) for other in (*others, swapped))
    assert checksum(square) != checksum(square.roll(1, 0))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_a_loop_that_refills_its_array() -> None:
    """EXACT, with a plan that rebuilds what does not start from the array itself."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        buffer, draw, losses = np.zeros((64, WIDTH), dtype=np.float32), np.random.default_rng(0), []
        for _ in range(6):
            buffer[:] = draw.random(buffer.shape)
            loss = model(torch.from_numpy(buffer)).square().mean()
            buffer[:] = 7.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.sin().exp())

    run = agrees(use, build=Starts)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops


@pytest.mark.parametrize("what", ["batch", "weights"])
def test_memory_that_becomes_numpys_after_the_plan_was_made(what: str) -> None:
    """Torch marks memory that numpy shares like another library's memory: in that step, results that start from it are kept.

    Two such steps take more than their plan: a third one is observed, and planned for.
    """

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(3)
        losses = []
        for i, batch in enumerate(batches(7)):
            if i >= 3:
                for t in batch if what == "batch" else model.parameters():
                    t.detach().numpy()
            losses.append(step(model, optimizer, batch))
        return losses

    assert agrees(use, profile_steps=1).plan is not None
