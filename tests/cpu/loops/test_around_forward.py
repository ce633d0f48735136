"""Contexts that user code enters around the model's call and leaves at any time: dispatch modes, saved-tensor hooks. Nested
batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.loops import agrees, assert_same, batches, loss_of, sgd, small, state

Around = Callable[[], contextlib.AbstractContextManager[Any]]
UNTIL = ("forward", "backward", "step", "next forward")


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, make: Around, until: str) -> tuple[list[Tensor], list[Any]]:
    """Losses of a loop that enters a context before each forward and leaves it later, and the contexts."""
    torch.manual_seed(7)
    losses, contexts, open_ = [], [], contextlib.ExitStack()
    for batch in batches(6):
        open_.close()
        contexts.append(make())
        with contextlib.ExitStack() as stack:
            stack.enter_context(contexts[-1])
            loss = loss_of(model, batch)
            if until == "next forward":
                open_ = stack.pop_all()
            elif until == "forward":
                stack.close()
            loss.backward()
            if until == "backward":
                stack.close()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    open_.close()
    return losses, contexts


def trained_twice(make: Around, until: str = "forward") -> tuple[list[Any], list[Any], Run]:
    """The same training, plainly and within the smallest plan: the contexts of each, and the run."""
    model = small()
    plain, expected = train(model, sgd(model), make, until)
    weights = state(model)
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", verbose=False) as run:
        ours, found = train(model, optimizer, make, until)
    assert all(map(torch.equal, plain, ours))
    assert_same(weights, state(model))
    assert not _get_current_dispatch_mode_stack()
    return expected, found, run


@pytest.mark.parametrize("until", UNTIL)
def test_a_mode_of_the_users(until: str) -> None:
    """It sees the ops of the plain run if nothing is rebuilt while it is on, and it ends when its user ends it."""
    expected, found, run = trained_twice(Count, until)
    assert run.status().frontier is not None
    counts = [[mode.ops for mode in modes] for modes in (expected, found)]
    if until == "forward":
        assert counts[0] == counts[1]
    else:  # it also counts the ops of rebuilds, and those with which the update is measured
        assert all(a <= b for a, b in zip(*counts, strict=True))


@contextlib.contextmanager
def coarse() -> Iterator[None]:
    """Hooks that save other bits."""
    with saved_tensors_hooks(
        lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t,
        lambda t: t.float() if t.is_floating_point() else t,
    ):
        yield


def test_hooks_that_change_bits_stay_and_a_line_says_so() -> None:
    with pytest.warns(UserWarning, match="there is no plan yet, because saved-tensor hooks"):
        _, _, run = trained_twice(coarse)
    assert run.status().frontier is None


def test_a_saved_tensor_that_may_be_written() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            y = h.sin()
            return h.mul_(2) + y

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for seed in range(3):
            with allow_mutation_on_saved_tensors():
                model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state(model)

    torch.manual_seed(0)
    plain = Writes()
    torch.manual_seed(0)
    ours = Writes()
    expected = run(plain, sgd(plain))
    with optimize(ours, optimizer := sgd(ours), budget="min", verbose=False):
        assert_same(expected, run(ours, optimizer))


def test_torchs_own_hooks_keep_the_bits_and_are_replaced() -> None:
    assert trained_twice(save_on_cpu)[2].session.status().frontier is not None


def test_a_checkpoint_of_the_whole_model_is_left_alone() -> None:
    """The checkpoint runs the forward twice: running statistics are updated twice."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)
        for x, _ in batches(6):
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="torch.utils.checkpoint is around the calls"):
        assert agrees(run).session.status().frontier is None


def test_an_export_in_the_middle_of_training_is_that_of_the_plain_model() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(7)
        sizes = []
        for i, batch in enumerate(batches(5)):
            if i in (0, 4):
                sizes.append(torch.tensor(len(torch.export.export(model, (batch[0],)).graph.nodes)))
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sizes

    assert agrees(run).session.status().frontier is not None


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_batches(layout: torch.layout) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        g = torch.Generator().manual_seed(0)
        for step in range(5):
            samples = [torch.randn(3 + i + step % 2, 16, generator=g) for i in range(4)]
            out = model(torch.nested.nested_tensor(samples, layout=layout))
            torch.nested.to_padded_tensor(out, 0.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    assert agrees(run, build).session.status().frontier is not None
