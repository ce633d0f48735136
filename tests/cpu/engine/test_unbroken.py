"""Modules that run without the recorder: which ops are theirs, and the bits of steps in which they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_memopt.runtime import Program
from tests.cpu.lib.loops import agrees, sgd, train
from tests.cpu.lib.models import Calls, data, made
from tests.cpu.lib.observed_graph import graph_of
from tests.cpu.lib.times import Known, given

X = data(32, 16)


class Cell(nn.Module):
    """Four ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().exp().sin()


def loop(x: torch.Tensor, cell: nn.Module) -> torch.Tensor:
    for _ in range(3):
        x = cell(x)
    return x


class Recursive(Cell):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


def spans(call: Callable[..., torch.Tensor], *layers: nn.Module) -> tuple[dict[str, list[str]], list[str]]:
    """Names of the ops of each module that is called once, and of all ops."""
    model = Calls(call, *layers)
    graph = graph_of(model, (X,), lambda: model(X).sum())
    names = [op.name for op in graph.forward]
    return {path: names[first:end] for path, (first, end) in graph.unbroken.items()}, names


def test_a_loop_over_a_cell_is_called_once_and_its_cell_is_not() -> None:
    modules, names = spans(lambda x, layer: layer(x).cos(), Calls(loop, Cell()))
    assert modules == {"layers.0": names[: names.index("aten::cos")]}
    assert len(modules["layers.0"]) > 3 * 4


def test_a_list_is_called_by_nobody() -> None:
    modules, _ = spans(lambda x, *layers: layers[1](layers[0](x)), Cell(), Cell())
    assert set(modules) == {"layers.0", "layers.0.layer", "layers.1", "layers.1.layer"}


def test_a_module_that_calls_itself_is_called_again() -> None:
    modules, _ = spans(lambda x, layer: layer(x), Recursive())
    assert not modules, "nor is the layer in it"


def test_what_has_no_ops_is_left_out() -> None:
    modules, _ = spans(lambda x, nothing, cell: cell(nothing(x)), nn.Identity(), Cell())
    assert "layers.0" not in modules and "layers.1" in modules


def test_a_part_that_another_module_calls_right_behind() -> None:
    """A part that is called again after its module does not belong to the module in that call."""

    def call(x: torch.Tensor, first: nn.Module) -> torch.Tensor:
        return first.layers[0](first(x))

    modules, names = spans(call, Calls(lambda x, cell: cell(x).cos(), Cell()))
    assert modules["layers.0"] == names[: names.index("aten::cos") + 1]
    assert "layers.0.layers.0" not in modules


def test_a_module_that_backward_calls_again_is_called_once_in_the_forward() -> None:
    def call(x: torch.Tensor, cell: nn.Module) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(cell, x, use_reentrant=False)

    modules, _ = spans(call, Cell())
    assert "layers.0" in modules


class Halves(nn.Module):
    """A loop over a cell of small tensors, and layers with large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small = Calls(loop, Cell())
        self.large = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small, x = self.small(x), x.repeat(16, 16)
        for layer in self.large:
            x = layer(x).tanh().exp().sin()
        return x + small.mean()


def test_a_loop_that_a_plan_keeps_runs_without_the_recorder(monkeypatch: pytest.MonkeyPatch, left: list[nn.Module]) -> None:
    """The plan rebuilds only large tensors, for it knows what the engine takes for each; the bits are those of a plain loop."""
    given(monkeypatch, Known())

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return train(model, optimizer, [(X, X)] * 6, lambda model, batch: model(batch[0]).square().mean())

    run = agrees(steps, lambda: made(Halves), sgd, budget=8_000_000)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops
    assert Program(run.status().frontier.graph, run.plan.lives).quiet.keys() == {"small"}
    assert Calls in map(type, left)
