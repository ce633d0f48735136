"""A step that is recorded without being computed is the step that is recorded for real: ops, sizes, lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.recording import STEPS, record
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.graph import OUTSIDE, Graph, Op, unmodified_levels

Build = Callable[[], Training]
SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "batch": 2, "length": 32},
    "llama": {"layers": 2, "batch": 2, "length": 32},
    "resnet50": {"batch": 1},
    "t5": {"batch": 2, "source": 16, "target": 12},
    "bert": {"batch": 2, "length": 16},
    "vit": {"batch": 1},
}


def computed(build: Build) -> Graph:
    """The graph of the same steps, computed."""
    training = build()
    options: dict[str, Any] = {"profile_steps": 1 << 20, "verify": False, "verbose": False}
    with optimize(training.model, training.optimizer, budget="min", **options) as run:
        for _ in range(STEPS):
            training.step()
        graph = run.session.observed_graph
    assert graph is not None
    return alone(graph)


def alone(graph: Graph) -> Graph:
    """The graph without what else is in this process."""
    return replace(graph, tensors=tuple(replace(t, nbytes=0) if t.name == OUTSIDE else t for t in graph.tensors))


def shape(op: Op) -> tuple[Any, ...]:
    """What must be equal of an op: all but its measured seconds and workspace."""
    return op.id, op.name, op.phase, op.inputs, op.outputs, op.mutates, op.recomputable, op.flops, op.scope


def without_workspaces(graph: Graph) -> int:
    ops = tuple(replace(op, workspace_nbytes=0) for op in graph.ops)
    return max(unmodified_levels(replace(graph, ops=ops)))


@pytest.mark.parametrize("name", SMALL)
def test_the_graph_is_the_one_that_is_recorded_for_real(name: str) -> None:
    if name not in ("resnet50",):
        pytest.importorskip("transformers")

    def build() -> Training:
        torch.manual_seed(0)
        return zoo.training(zoo.MODELS[name](**SMALL[name]), torch.device("cpu"))

    recorded, real = record(build), computed(build)
    graph = alone(recorded.graph)
    assert [shape(op) for op in graph.ops] == [shape(op) for op in real.ops]
    assert graph.tensors == real.tensors and graph.saves == real.saves and graph.points == real.points
    assert without_workspaces(graph) == without_workspaces(real), "kernels that do not run have no workspaces"
    assert not recorded.ran and not recorded.assumed


class Mixed(nn.Module):
    """Dropout, batch norm, a tied weight, a write in place, and a branch on the values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(64)
        self.branches: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(64) < 32
        self.branches.append(bool(mask.any()) and not bool(mask.all()))
        h = nn.functional.dropout(self.norm(self.first(x)), 0.1).relu_()
        return self.last(h.masked_fill(mask, 0.0)).mul_(2)


def mixed() -> Training:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def test_autocast_clipping_tied_weights_and_writes_in_place() -> None:
    graph, real = alone(record(mixed).graph), computed(mixed)
    assert [shape(op) for op in graph.ops] == [shape(op) for op in real.ops]
    assert graph.tensors == real.tensors and without_workspaces(graph) == without_workspaces(real)


def test_values_that_are_known_steer_as_they_do_for_real() -> None:
    training = mixed()
    with Unfilled() as mode:
        training.step()
    mode.close()
    assert isinstance(training.model, Mixed) and training.model.branches == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_number_of_an_unfilled_tensor_is_assumed(dtype: torch.dtype) -> None:
    with Unfilled() as mode:
        x = torch.empty(3, dtype=dtype)
        assert x[0].item() == (1.0 if dtype.is_floating_point else 0)
        assert not torch.isnan(torch.empty(3)).any()
        assert torch.arange(3)[2].item() == 2, "its bytes were computed"
    assert mode.assumed["aten::_local_scalar_dense"] == 2
    mode.close()


def test_what_is_filled_has_bytes_and_what_is_made_of_it() -> None:
    with Unfilled() as mode:
        x = torch.empty(4)
        assert mode.is_unfilled(x) and mode.is_unfilled(x.exp()) and mode.is_unfilled(x[:2])
        x[1:].fill_(1.0)
        assert mode.is_unfilled(x), "only a part of it was filled"
        x.fill_(2.0)
        assert not mode.is_unfilled(x) and x.sum().item() == 8.0
        x.add_(torch.empty(4))
        assert mode.is_unfilled(x)
    mode.close()


def test_a_router_chooses_all_experts_equally_often() -> None:
    with Unfilled() as mode:
        _, chosen = torch.topk(torch.empty(12, 4), 2, dim=-1)
        assert chosen.flatten().bincount().tolist() == [6, 6, 6, 6]
    assert mode.assumed["aten::topk"] == 1
    mode.close()


def test_a_step_of_a_gradient_scaler_is_not_skipped() -> None:
    model = nn.Linear(8, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    with Unfilled() as mode:
        nn.init.normal_(model.weight)
        scaler.scale(model(torch.empty(4, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    mode.close()
    assert updates == [1]


def test_a_model_on_meta() -> None:
    from lightning_memopt.fitting.sources import _give_memory

    def build(on_meta: bool) -> Training:
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        _give_memory(model)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    on_meta, real = alone(record(lambda: build(True)).graph), computed(lambda: build(False))
    assert [shape(op) for op in on_meta.ops] == [shape(op) for op in real.ops] and on_meta.tensors == real.tensors


def test_the_random_numbers_that_follow_are_the_same() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    training = mixed()

    def draws() -> Training:
        torch.randn(100)
        return training

    torch.manual_seed(3)
    record(draws)
    assert torch.equal(torch.randn(4), expected)


def test_a_step_without_a_backward_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="must run a forward of the model in training, its backward"):
        record(lambda: Training(model, torch.optim.SGD(model.parameters()), lambda: model(torch.ones(1, 4))))


LARGE = """
import resource, torch
from torch import nn
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import record

def build():
    model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(8192, 16384)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
graph = record(build).graph
print(sum(t.nbytes for t in graph.tensors) >> 30, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere untouched memory may count as used")
def test_a_step_takes_no_memory() -> None:
    """24 layers of 1 GiB, with gradients and the state of AdamW: 96 GiB and more."""
    printed = subprocess.check_output([sys.executable, "-W", "ignore", "-c", LARGE], text=True).splitlines()[-1]
    recorded_gib, grown_mib = map(int, printed.split())
    assert recorded_gib > 90 and grown_mib < 500
