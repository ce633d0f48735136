"""Steps that leave out layers, or run ops in another order, under random plans: the tensor that is used instead of one that
was not made serves every rebuild, with the bits of the plain step and about the bytes that the plan predicts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.robustness.fuzzing.plans import random_lives
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, simulate
from lightning_memopt.runtime import Program
from lightning_memopt.solvers.rollout import Rollout, unrepeatable
from tests.cpu.engine.test_rejoining import DEPTH, TOKENS, WIDTH, Layers, Skips, Stack, Twice
from tests.cpu.lib.stepped import Stepped, same, stepped

HIDDEN = TOKENS * WIDTH * 4
PLANS = 6


class Once(nn.Module):
    """The loss of one batch; `skips`: the layers that the next forward leaves out."""

    def __init__(self, first: bool, drawn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = Layers([], first, drawn)
        self.x = torch.randn(TOKENS, WIDTH)
        self.skips: set[int] = set()

    def forward(self) -> Tensor:
        self.layers.skips, self.layers.calls = [self.skips], 0
        return self.layers(self.x).square().mean()


@pytest.fixture(params=["post", "pre"])
def first(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "pre")


@pytest.fixture(params=["silent", "drawn"])
def step(request: pytest.FixtureRequest, first: bool) -> Iterator[Stepped]:
    with stepped(Once(first, request.param == "drawn")) as one:
        yield one


def draw(rng: random.Random) -> Skips:
    """Layers to leave out: none; the first, instead of whose result a tensor from before the step is used; the first and
    another; any.
    """
    return [set(), {0}, {0, rng.randrange(1, DEPTH)}, {i for i in range(DEPTH) if rng.random() < 0.4}]


def test_layers_are_left_out_under_any_plan(step: Stepped) -> None:
    model, rng = step.model, random.Random(0)
    assert isinstance(model, Once)
    for _ in range(PLANS):
        lives = random_lives(step.graph, rng, held=rng.choice((0.0, 0.1, 0.3)))
        program = Program(step.graph, lives)
        predicted = simulate(step.graph, lives, program.schedule).predicted.peak_nbytes
        for model.skips in draw(rng):
            expected = step.step()
            assert same(expected, step.step(program)), f"without {model.skips}"
            above = step.peak_nbytes(program) - predicted
            assert above <= 2 * HIDDEN, f"{above} bytes above the plan without {model.skips}"


class Swapped(nn.Module):
    """The loss of one batch; `other`: the next forward runs its ops in the other order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = Stack(*(Twice(set()) for _ in range(4)))
        self.x = torch.randn(TOKENS, WIDTH)
        self.other = False

    def forward(self) -> Tensor:
        for part in self.stack.parts:
            assert isinstance(part, Twice)
            part.calls, part.count = {0} if self.other else set(), 0
        return self.stack(self.x).square().mean()


@pytest.mark.parametrize("seed", [0, 1, 52])
def test_ops_run_in_another_order_under_any_plan(seed: int) -> None:
    """Then the unpacks of backward come in another order, too: a tensor stays until its unpack, even if the plan had it
    earlier.
    """
    model, rng = Swapped(), random.Random(seed)
    with stepped(model) as step:
        program = Program(step.graph, random_lives(step.graph, rng, held=rng.choice((0.1, 0.2, 0.4))))
        for model.other in (False, True, True, False):
            assert same(step.step(), step.step(program))


class Added(nn.Module):
    """The loss of one batch: parts whose layers are added up in place, the first one deeper. `shorter`: without the
    last layers.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(4))
        self.x = torch.randn(TOKENS, WIDTH)
        self.shorter = False

    def forward(self) -> Tensor:
        x = self.x
        for i, (one, last) in enumerate(self.parts):
            out, h = torch.zeros_like(x), one(torch.tanh(x))
            for _ in range(1 if i else 8):
                h = h.sin()
            out.add_(h)
            if not self.shorter:
                out.add_(last(x))
            x = x + torch.tanh(out)
        return x.square().mean()


def sums_held(graph: Graph) -> tuple[Life, ...]:
    """A plan that holds what was added up in place, and rebuilds the rest from there."""
    written = {new for op in graph.ops for _, new in op.mutates}
    sums = {t for op in graph.forward if op.name.startswith("aten::tanh") for t in op.inputs if t in written}
    roll = Rollout(graph)
    roll.serve(sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at), sums | unrepeatable(graph))
    return roll.lives()


def test_what_stands_in_goes_when_the_planned_tensor_would() -> None:
    """A sum without its last layer is one that the plan overwrites, so nothing rebuilds it: it is held, but not to the end."""
    model = Added()
    with stepped(model) as step:
        lives = sums_held(step.graph)
        program = Program(step.graph, lives)
        predicted = simulate(step.graph, lives, program.schedule).predicted.peak_nbytes
        for model.shorter in (False, True, True):
            assert same(step.step(), step.step(program))
            above = step.peak_nbytes(program) - predicted
            assert above <= 0, f"{above} bytes above the plan"
