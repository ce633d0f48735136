"""Compiled code that runs something eagerly in a recorded forward: dynamo is asked to compile what it is asked for plainly."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

from lightning_memopt import optimize
from tests.cpu.lib.fits import assert_same_tree
from tests.cpu.lib.loops import leaves_nothing
from tests.cpu.lib.models import data, made, sgd
from tests.cpu.lib.tracing import untraced

WIDTH = 32
STEPS = 5
TORCH = str(Path(torch.__file__).parent)
Loss = Callable[[nn.Module, Tensor], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo names what it cannot trace


class Broken(nn.Module):
    """Dynamo gives up in the middle of it: an op whose result has no fixed size, and an address, are asked for eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        chosen = x.masked_select(x > 0)
        chosen.detach().data_ptr()
        return self.second(x * chosen.mean())


def layers() -> nn.Module:
    """Of torch's own: dynamo passes over their frames, and compiles nothing."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))


class Tower(nn.Module):
    def __init__(self, part: Callable[[], nn.Module], compiled: bool) -> None:
        super().__init__()
        self.before, self.part, self.after = layers(), part(), layers()
        if compiled:
            self.part.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.part(self.before(x).sin())).exp().sin()


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@contextlib.contextmanager
def handed_over() -> Iterator[Counter[tuple[str, str]]]:
    """What dynamo is asked to compile, file and function, but for torch's own, which it skips; and how many graphs it makes."""
    seen: Counter[tuple[str, str]] = Counter()
    ask = convert_frame.CatchErrorsWrapper.__call__

    def counted(self: Any, frame: Any, *rest: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TORCH):
            seen[frame.f_code.co_filename, frame.f_code.co_name] += 1
        return ask(self, frame, *rest)

    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_frame.CatchErrorsWrapper, "__call__", counted)
        yield seen
    seen["graphs", ""] = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def trained(build: Callable[[], nn.Module], loss: Loss, budget: str | None) -> tuple[list[object], Counter[Any], Any]:
    model = made(build)
    optimizer = sgd(model)
    losses = []
    watched: Any = contextlib.nullcontext()
    if budget is not None:
        watched = optimize(model, optimizer, budget=budget, profile_steps=2, verbose=False)
    torch.manual_seed(3)
    with leaves_nothing(model), handed_over() as frames, watched as run:
        for i in range(STEPS):
            value = loss(model, data(64, WIDTH, seed=i))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
    return [losses, model.state_dict(), torch.rand(3)], frames, run


def agree(build: Callable[[], nn.Module], loss: Callable[[], Loss] = lambda: mean_square) -> Counter[tuple[str, str]]:
    expected, plainly, _ = trained(build, loss(), None)
    found, frames, run = trained(build, loss(), "min")
    assert_same_tree(expected, found)
    assert frames == plainly
    assert run.plan is not None and run.plan.predicted.rebuilt_nbytes > 0
    return frames


def test_a_compiled_part_of_layers_that_dynamo_passes_over() -> None:
    """EXACT: what is called compiled and runs eagerly is recorded and dropped, and nothing of ours is compiled in its place."""
    agree(lambda: Tower(layers, compiled=True))


def test_a_compiled_part_that_breaks_its_graph() -> None:
    """EXACT: the region is compiled as often as plainly, and what is eager is dropped, around it and in its breaks."""
    assert agree(lambda: Tower(Broken, compiled=True))["graphs", ""] > 1


@untraced
def test_a_model_that_a_compiled_function_calls_eagerly() -> None:
    """EXACT: the loss function is compiled, the model breaks its graph: its call is seen, and its parts compiled as plainly."""
    agree(lambda: Tower(Broken, compiled=False), lambda: torch.compile(mean_square, backend="eager"))
