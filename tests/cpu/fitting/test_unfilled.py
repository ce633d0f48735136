"""A step that is recorded without being computed is the step that is recorded for real: ops, sizes, lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.lib.graphs import computed, different, peak_nbytes
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.operators import CudaOperators
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.fitting.workspaces import sum_nbytes
from tests.cpu.lib.trainings import training_of

SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "batch": 2, "length": 32},
    "llama": {"layers": 2, "batch": 2, "length": 32},
    "resnet50": {"batch": 1},
    "t5": {"batch": 2, "source": 16, "target": 12},
    "bert": {"batch": 2, "length": 16},
    "vit": {"batch": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_graph_is_the_one_that_is_recorded_for_real(name: str) -> None:
    if name not in ("resnet50",):
        pytest.importorskip("transformers")

    def build() -> Training:
        torch.manual_seed(0)
        return zoo.training(zoo.MODELS[name](**SMALL[name]), torch.device("cpu"))

    recorded, real = record(build), computed(build)
    assert not different(recorded.graph, real)
    assert peak_nbytes(recorded.graph) == peak_nbytes(real)
    assert not recorded.ran and not recorded.assumed


T, C, S = (4, 8, 3), (2, 8, 6, 6), (5, 7)


def turned(size: tuple[int, ...]) -> torch.Tensor:
    """Not contiguous."""
    return torch.rand(size).transpose(1, -1).contiguous().transpose(1, -1)


def last(size: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(size).contiguous(memory_format=torch.channels_last)


F, aten = nn.functional, torch.ops.aten
MADE: dict[str, Callable[[], Any]] = {
    "layer norm": lambda: aten.native_layer_norm_backward(
        turned(T), torch.rand(T), [3], torch.rand(4, 8, 1), torch.rand(4, 8, 1), None, None, [True, False, False]
    )[0],
    "softmax": lambda: aten._softmax_backward_data(turned(T), torch.rand(T), -1, torch.float32),
    "log softmax": lambda: aten._log_softmax_backward_data(turned(T), torch.rand(T), -1, torch.float32),
    "softplus": lambda: aten.softplus_backward(turned(T), torch.rand(T), 1, 20),
    "mean square": lambda: aten.mse_loss_backward(torch.rand(()), turned(T), torch.rand(T), 1),
    "batch norm": lambda: F.batch_norm(turned(T), None, None, training=True),
    "batch norm, channels last": lambda: F.batch_norm(last(C), None, None, training=True),
    "depthwise": lambda: F.conv2d(last(C), torch.rand(8, 1, 3, 3), groups=8),
    "losses": lambda: [f(torch.rand(S), torch.rand(S)) for f in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy)],
    "soft margin": lambda: F.soft_margin_loss(torch.rand(S), torch.ones(S)),
    "fold": lambda: F.fold(torch.rand(1, 36, 64), (8, 8), 3, padding=1),
    "parts of an LSTM's gates": lambda: torch.unsafe_chunk(torch.rand(4, 8), 4, 1),
    "a transposition in place": lambda: torch.rand(3, 5).t_(),
    "a new dimension": lambda: torch.rand(3, 5).unsqueeze_(1),
}


@pytest.mark.parametrize("name", MADE)
def test_strides_and_memory_are_those_of_a_tensor_that_is_computed(name: str) -> None:
    def shown(made: Any) -> list[Any]:
        tensors = made if isinstance(made, (list, tuple)) else [made]
        return [(t.size(), t.stride(), t.untyped_storage().nbytes()) for t in tensors]

    expected = shown(MADE[name]())
    with mock.patch("lightning_memopt.fitting.unfilled.SMALL", 0), Unfilled() as mode:
        assert shown(MADE[name]()) == expected
    mode.close()


def test_conditions_hold_for_all_and_nothing_is_not_a_number() -> None:
    with Unfilled() as mode:
        x = torch.empty(6)
        assert (x > 0).all() and (x < 0).all(), "what a script checks is as it should be"
        assert torch.isnan(x).sum() == 0 and not (x > 0).any()
        assert torch.argmax(x.view(3, 2), dim=-1).tolist() == [0, 1, 0], "a router"
    mode.close()


def test_values_that_are_read_all_at_once() -> None:
    with Unfilled() as mode, CudaOperators(mode):
        x = torch.empty(2, 3)
        assert x.tolist() == [[1.0] * 3] * 2
        assert torch.empty(2, dtype=torch.int64).numpy().tolist() == [0, 0]
    assert mode.assumed["aten::_local_scalar_dense"] == 2
    mode.close()


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
    graph, real = record(mixed).graph, computed(mixed)
    assert not different(graph, real) and peak_nbytes(graph) == peak_nbytes(real)


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
        with torch.inference_mode():
            assert torch.empty(3, dtype=dtype)[0].item() == (1.0 if dtype.is_floating_point else 0)
    assert mode.assumed["aten::_local_scalar_dense"] == 3 and not mode.ran
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
        return training_of(model, optimizer, lambda: model(torch.randn(8, 16)).square().mean())

    assert not different(record(lambda: build(True)).graph, computed(lambda: build(False)))


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


@pytest.mark.parametrize(
    ("size", "groups", "dtype", "nbytes"),
    [
        ((2, 3, 256, 64), 1, torch.float32, 393216 + 2 * 6144),
        ((2, 3, 257, 64), 1, torch.float32, 492000 + 6168),
        ((2, 3, 65, 64), 1, torch.bfloat16, 196800 + 1560),
        ((2, 3, 256, 32), 1, torch.bfloat16, 393600 + 6144),
        pytest.param(
            *((2, 8, 256, 64), 4, torch.float32, 1048576 + 2 * 16384 + 2 * 1048576),
            marks=pytest.mark.skipif(torch.__version__ < (2, 14), reason="this torch has no such attention of grouped heads"),
        ),
        ((2, 3, 257, 80), 1, torch.float32, 6 * 196704 + 6168),
        ((2, 3, 192, 96), 1, torch.bfloat16, 6 * 131104 + 4608),
        ((2, 3, 192, 160), 1, torch.float32, 6 * 196704 + 4608),
        ((2, 3, 256, 160), 1, torch.bfloat16, 0),
    ],
    ids=str,
)
def test_the_workspace_of_attention(size: tuple[int, ...], groups: int, dtype: torch.dtype, nbytes: int) -> None:
    """As torch 2.14's host code asked for on an emulated device; wide heads in half precision are not known."""

    def training() -> Training:
        q = nn.Parameter(torch.empty(size, dtype=dtype))
        k, v = (nn.Parameter(torch.empty(size[0], size[1] // groups, *size[2:], dtype=dtype)) for _ in range(2))

        class Attends(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tensors = nn.ParameterList([q, k, v])

            def forward(self) -> torch.Tensor:
                return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0].sum()

        model = Attends()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return training_of(model, optimizer, lambda: model())

    ops = record(training, cuda=True).graph.ops
    (found,) = [op.workspace_nbytes for op in ops if op.name.endswith("efficient_attention_backward")]
    assert found == nbytes


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (8224, 1280, 84541480),
        (8224, 5120, 138936480),
        (1000, 1280, 0),
        (8224, 128256, 328339368),
        (65536, 20000, 163840628),
        (4096, 1, 0),
    ],
)
def test_the_workspace_of_a_sum(rows: int, columns: int, nbytes: int) -> None:
    """As torch 2.14's host code asked for on an emulated device."""
    assert sum_nbytes(rows, columns) == nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_of_a_gradient_of_a_bias(dtype: torch.dtype) -> None:
    def training() -> Training:
        model = nn.Linear(64, 1280, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return training_of(model, optimizer, lambda: model(torch.randn(32, 257, 64, dtype=dtype)).square().mean())

    ops = record(training, cuda=True).graph.ops
    assert [op.workspace_nbytes for op in ops if op.name == "aten::sum.dim_IntList"] == [84541480]


@pytest.mark.parametrize(
    "read", [lambda t: t.numpy().tolist(), np.asarray, torch.Tensor.tolist], ids=["numpy", "asarray", "tolist"]
)
def test_a_forward_that_is_recorded_reads_known_values(read: Callable[[torch.Tensor], Any]) -> None:
    """A recorder wraps the methods that give memory away, to know who writes there."""
    seen = []

    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            seen.append(np.array(read(made.detach())))
            return made

    def build() -> Training:
        model = Reading(64, 1 << 17)  # from fresh pages, which are zero
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()

        return Training(model, optimizer, step)

    record(build)
    assert seen and all((values == 1).all() for values in seen)
