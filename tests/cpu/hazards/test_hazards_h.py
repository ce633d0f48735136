"""torch.compile: compiled parts, compiled wholes, compiled loss functions, with checkpoints and hooks around. Always exact.

What a compiled region saves is opaque: it is kept, and the plan works on the rest. Backends without a C++ compiler are enough:
what matters is how dynamo and AOTAutograd meet the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt.graph import resident_nbytes
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.models import BATCHES, Body, Noisy, attached, data, made, sgd, squares, train

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_trains(
    factory: Callable[[], nn.Module],
    batches: list[torch.Tensor] | None = None,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = squares,
    whole: Callable[[nn.Module], nn.Module] = lambda m: m,
    planned: bool = True,
) -> Run:
    """The loop with the compiled model, plainly and inside `optimize`: same parameters, buffers and stream.

    And the same number of graphs, unless regions run ops again, for which they are compiled again: nothing of ours is compiled
    in, or makes dynamo compile a region again.
    """
    batches = 3 * (batches or BATCHES)  # regions may be compiled again several times
    results: list[Any] = []
    for attach in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = made(factory)
        called = whole(model)
        optimizer = sgd(model)
        if attach:
            with attached(called, optimizer) as run:
                draw = train(called, batches, loss, optimizer=optimizer)
        else:
            draw = train(called, batches, loss, optimizer=optimizer)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results.append({**model.state_dict(), "state of the generator": draw, "graphs compiled": torch.tensor(graphs)})
    if "compiled regions run ops again" in (said := run.status().compiled or "") and not said.startswith("0 of"):
        assert results[1].pop("graphs compiled") > results[0].pop("graphs compiled")
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name
    assert (run.plan is not None) is planned
    return run


def dropped_share(run: Run) -> float:
    """The share of the activations' bytes that the smallest plan saves."""
    plan, frontier = run.plan, run.status().frontier
    base = resident_nbytes(frontier.graph)
    return 1 - (plan.predicted_peak_nbytes - base) / (plan.unmodified_peak_nbytes - base)


class Parts(nn.Module):
    """Eager layers around one that is compiled."""

    def __init__(self, backend: str, body: type[Body] = Body) -> None:
        super().__init__()
        self.before, self.after = body(depth=3), Body(depth=3)
        self.middle = torch.compile(body(depth=2), backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(x)))


@pytest.mark.parametrize("body", [Body, Noisy])
@pytest.mark.parametrize("backend", BACKENDS)
def test_h1_compiled_part(backend: str, body: type[Body]) -> None:
    """EXACT: the region stays compiled, and the eager layers around it are dropped and rebuilt."""
    run = compiled_trains(lambda: Parts(backend, body))
    assert any(life.how == "rebuild" for life in run.plan.lives) and dropped_share(run) > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_h1_compiled_model(backend: str, how: str) -> None:
    """EXACT: the whole model compiled, as another module or in place. What the run saves is what it says."""

    def whole(model: nn.Module) -> nn.Module:
        if how == "torch.compile":
            return torch.compile(model, backend=backend)
        model.compile(backend=backend)
        return model

    run = compiled_trains(lambda: Body(depth=4), whole=whole)
    measured = run.status().measured_peak_nbytes
    predicted = run.plan.predicted_peak_nbytes
    assert measured is not None and abs(measured - predicted) <= 0.01 * predicted + (1 << 14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_h1_model_called_in_a_compiled_function(backend: str) -> None:
    """EXACT: the loss function is compiled and calls the model: dynamo takes its forward in, no call is seen, which is said."""
    compiled = torch.compile(squares, backend=backend)
    run = compiled_trains(Body, loss=lambda m, x: compiled(m, x), planned=False)
    assert "no training step was seen" in run.report()


@pytest.mark.parametrize("inside", [True, False], ids=["compiled in checkpoint", "checkpoint in compiled"])
def test_h2_checkpoint_and_sizes_that_change(inside: bool) -> None:
    """EXACT: a compiled region in a checkpoint, a checkpoint in a compiled region, and batches that make shapes dynamic.

    Where a static graph becomes a dynamic one between forward and recomputation, torch's checkpoint fails in the plain run too
    (pytorch#166926): hence `dynamic=True`.
    """

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Body(), Body()
            body = Body()
            self.middle = torch.compile(body, backend="aot_eager", dynamic=True) if inside else body
            self.around = self.call if inside else torch.compile(self.call, backend="aot_eager")

        def call(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.middle, x, use_reentrant=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.around(self.before(x)))

    batches = [data(size, 16, seed=i) for i, size in enumerate((64, 48, 40, 64, 48, 40, 64))]
    compiled_trains(Checkpointed, batches)


def test_h3_hooks_checkpoint_and_compile() -> None:
    """EXACT: the user's own saved-tensor hooks around, a checkpoint in them, a compiled region in that."""

    class Around(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            with torch.autograd.graph.save_on_cpu():
                x = checkpoint(self.middle, x, use_reentrant=False)
                x = self.middle(x)
            return self.after(x)

    compiled_trains(lambda: Around("aot_eager"))


def test_h1_recompiled_when_attached_and_left() -> None:
    """EXACT: compiled before the run, used in it, and after it; nothing of ours is compiled in."""
    model = made(lambda: Body(depth=4))
    plain = made(lambda: Body(depth=4))
    called, expected = (torch.compile(m, backend="aot_eager") for m in (model, plain))
    optimizer, other = sgd(model), sgd(plain)
    train(expected, BATCHES * 2, optimizer=other)
    train(called, BATCHES[:2], optimizer=optimizer)
    with attached(called, optimizer):
        train(called, [*BATCHES[2:], *BATCHES[:2]], optimizer=optimizer)
    train(called, BATCHES[2:], optimizer=optimizer)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(a, b)
