"""A graph that is dropped in the forward: it releases its saves one after the other, and nothing of it stays for that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_memopt.graph import unmodified_levels
from tests.cpu.lib.observed_graph import graph_of


class Unused(nn.Module):
    """A branch whose result is not used."""

    def __init__(self, dropped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        if self.dropped:
            self._branch(h)
        return self.layers[5](h).square().mean()

    def _branch(self, h: Tensor) -> None:
        for layer in self.layers[1:5]:
            h = layer(h).tanh().sigmoid()


def test_nothing_stays_after_its_release() -> None:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    model = Unused(dropped=True)
    graph = graph_of(model, (x,), lambda: model(x))
    assert not [t for t in graph.tensors if t.name == "held by what is not recorded" and t.nbytes]
    last = max(op.at for op in graph.forward if op.name == "aten::sigmoid")
    levels = unmodified_levels(graph)
    assert levels[last] == max(levels[: last + 12]), "from its last op on, the memory of the branch only falls"
