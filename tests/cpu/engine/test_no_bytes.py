"""Tensors without elements: a weight of 0 bytes is in memory, and is not taken for a sharded weight that is away."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lightning_memopt.solvers.recompute.baselines import recompute_everything
from tests.cpu.lib.engines import by_python, gradients_of, needs_native, observed_graph, steps


class Hollow(nn.Module):
    """Its first layer, and the embedding, have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.hollow, self.layer = nn.Linear(0, 8), nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.layer(x) + self.hollow(x[:, :0]))
        return torch.cat([y, self.empty]).tanh().square().mean()


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Hollow(), torch.randn(16, 8)


def plain() -> list[bytes]:
    model, x = made()
    model(x).backward()
    return gradients_of(model)


def test_a_weight_without_elements_is_read_again() -> None:
    graph = observed_graph(made)
    for planned in by_python(made, graph, recompute_everything(graph)):
        assert planned.rebuilt_ops and planned.gradients == plain(), planned.loss


@needs_native
def test_by_the_native_engine_too() -> None:
    graph = observed_graph(made)
    lives = recompute_everything(graph)
    for native, python in zip(steps(made, graph, lives), by_python(made, graph, lives), strict=True):
        assert native._replace(native_ops=0) == python
