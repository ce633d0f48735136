"""A step that is recorded for a card has CUDA's operators, and what they make on the host is not counted.

The same operators, tensor by tensor, beside torch's CUDA build: `python -m tests.emulated.recorded`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import record
from lightning_memopt.graph import Graph
from tests.cpu.lib.trainings import training_of

ROWS, WIDTH = 8, 32
Adam = Callable[[Any], torch.optim.Optimizer]


def graph_of(model: nn.Module, run: Callable[[nn.Module], Tensor], adam: Adam = torch.optim.AdamW) -> Graph:
    """The step of a model, recorded for a card."""

    def build() -> Training:
        optimizer = adam(model.parameters())
        return training_of(model, optimizer, lambda: run(model).square().mean())

    return record(build, cuda=True).graph


def names(graph: Graph) -> Counter[str]:
    return Counter(op.name.removeprefix("aten::") for op in graph.ops)


class Normed(nn.Module):
    """A normalization between two layers."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv1d(3, 8, 1).to(dtype), norm

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(x)).sin()
        return found


@pytest.mark.parametrize(
    ("norm", "dtype", "by_cudnn"),
    [
        (nn.BatchNorm1d(8), torch.float32, True),
        (nn.BatchNorm1d(8).eval(), torch.float32, True),
        (nn.BatchNorm1d(8), torch.float16, True),
        (nn.BatchNorm1d(8, track_running_stats=False), torch.float32, True),
        (nn.BatchNorm1d(8).bfloat16(), torch.bfloat16, False),
        (nn.BatchNorm1d(8, affine=False), torch.float32, False),
    ],
    ids=["training", "evaluation", "float16", "no statistics", "bfloat16", "no weights"],
)
def test_batch_normalization_is_cudnns_where_torch_chooses_it(norm: nn.Module, dtype: torch.dtype, by_cudnn: bool) -> None:
    graph = graph_of(Normed(norm, dtype), lambda model: model(torch.randn(ROWS, 3, 5, dtype=dtype)))
    seen = names(graph)
    assert (seen["cudnn_batch_norm"], seen["native_batch_norm"]) == ((1, 0) if by_cudnn else (0, 1))
    (op,) = [op for op in graph.forward if "batch_norm" in op.name]
    assert graph.tensors[op.outputs[0]].nbytes == 512 * -(-ROWS * 8 * 5 * dtype.itemsize // 512)


def test_cudnn_can_be_switched_off() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        seen = names(graph_of(Normed(nn.BatchNorm1d(8)), lambda model: model(torch.randn(ROWS, 3, 5))))
    assert (seen["cudnn_batch_norm"], seen["native_batch_norm"]) == (0, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("autocast", [False, True])
def test_cells_of_recurrent_nets_are_fused(cell: type[nn.LSTMCell | nn.GRUCell], bias: bool, autocast: bool) -> None:
    """Two products, and one op for the rest, which keeps four values for each of an LSTM's, and five for each of a GRU's."""

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", enabled=autocast, dtype=torch.bfloat16):
            state = model(torch.randn(ROWS, WIDTH))
            state = model(torch.randn(ROWS, WIDTH), state)
        return (state[0] if cell is nn.LSTMCell else state).float()

    graph = graph_of(cell(WIDTH, WIDTH, bias=bias), run)
    fused, kept = ("_thnn_fused_lstm_cell", 4) if cell is nn.LSTMCell else ("_thnn_fused_gru_cell", 5)
    seen = names(graph)
    assert (seen[fused], seen["tanh_"], seen["sigmoid_"]) == (2, 0, 0)
    assert sum(n for name, n in seen.items() if name.startswith(fused + "_backward")) == 2
    workspaces = [op.outputs[-1] for op in graph.forward if op.name == f"aten::{fused}"]
    nbytes = ROWS * WIDTH * kept * (2 if autocast else 4)
    assert [graph.tensors[t].nbytes for t in workspaces] == [nbytes] * 2


@pytest.mark.parametrize(("options", "nbytes"), [({}, 0), ({"foreach": True}, 0), ({"fused": True}, 512)])
def test_numbers_of_steps_are_on_the_host_unless_the_update_is_fused(options: dict[str, bool], nbytes: int) -> None:
    """What each parameter has: two moments, and the number."""
    graph = graph_of(
        nn.Linear(WIDTH, WIDTH), lambda model: model(torch.randn(1, WIDTH)), lambda p: torch.optim.AdamW(p, **options)
    )
    state = sum(t.nbytes for t in graph.tensors if t.kind == "optimizer_state")
    assert state == 2 * (WIDTH * WIDTH * 4 + 512) + 2 * nbytes
    if not nbytes:
        assert not any(t.name == "temporary" and t.nbytes for t in graph.tensors), "what is added to them"


def test_numbers_of_user_code_are_on_the_host() -> None:
    """The 2 of a product and the 3 that is written are no memory of the card; a tensor of one number is."""

    def run(model: nn.Module) -> Tensor:
        h = model(torch.randn(ROWS, WIDTH))
        h = h * 2.0
        h[0] = 3.0
        return h.sin() * torch.ones(())

    graph = graph_of(nn.Linear(WIDTH, WIDTH), run)
    small = [t for t in graph.tensors if t.nbytes == 512 and t.size == () and t.kind != "optimizer_state"]
    made = {graph.producers[t.id].name for t in small if t.id in graph.producers}
    assert "aten::ones" in made and not any("fill" in name or "lift" in name for name in made)
    assert not any(t.nbytes for t in graph.tensors if t.name == "made by what is not recorded")


def test_ops_whose_bits_vary_on_cuda_do_not_run_again() -> None:
    """On the CPU they may: there they add up in one order."""

    class Sums(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            h, index = super().forward(input), torch.zeros(ROWS, dtype=torch.long)
            return torch.zeros_like(h).index_add(0, index, h).sin() + h.cumsum(0).sin()

    graph = graph_of(Sums(WIDTH, WIDTH), lambda model: model(torch.randn(ROWS, WIDTH)))
    may = {op.name.removeprefix("aten::").partition(".")[0]: op.recomputable for op in graph.forward}
    assert not may["index_add"] and not may["cumsum"] and may["sin"]
