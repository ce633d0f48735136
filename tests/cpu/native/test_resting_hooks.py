"""Where the plan handles no saved tensor, torch saves tensors itself; who else enters hooks gets every tensor all the same."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.native import engine
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from tests.cpu.lib.engines import Made, by_python, needs_native, observed_graph, steps

pytestmark = needs_native


class Layers(nn.Module):
    """Six layers; `within` runs the middle of the forward."""

    def __init__(self, within: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda part: part()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        x = self.within(lambda: self._middle(x))
        for layer in self.layers[4:]:
            x = layer(x).sin()
        return x.square().mean()

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[2:4]:
            x = layer(x).sigmoid()
        return x


def made(within: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda part: part()) -> Made:
    return lambda: (Layers(within), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))


def is_tracing() -> bool:
    """Whether torch calls no saved-tensor hooks in this thread now."""
    before: bool = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    torch._C._autograd._saved_tensors_hooks_set_tracing(before)
    return before


def planned(model: nn.Module, learned: Learned, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The loss of a planned forward, and whether hooks rest at its end."""
    with PlannedRecording(PlannedEngine(learned), model):
        loss = model(x)
        return loss, is_tracing()


def test_they_rest_within_the_forward_only() -> None:
    model, x = made()()
    learned = Learned(Program(observed_graph(made()), ()))
    rested = []
    for _ in range(3):
        loss, rests = planned(model, learned, x)
        rested.append(rests)
        assert not is_tracing()
        loss.backward()
    assert rested == [False, True, True], "the first forward learns the templates"


def test_hooks_that_the_user_enters_get_every_tensor() -> None:
    packed: list[int] = []

    def hooked(part: Callable[[], torch.Tensor]) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: (packed.append(t.numel()), t)[1], lambda t: t):
            return part()

    model, x = made(hooked)()
    model(x).backward()
    expected = packed.copy()
    assert expected
    learned = Learned(Program(observed_graph(made(hooked)), ()))
    for _ in range(3):
        packed.clear()
        planned(model, learned, x)[0].backward()
        assert packed == expected


def penalised(part: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A penalty on gradients: a backward in the forward, which puts the state of its thread back after each node."""
    y = part()
    (grad,) = torch.autograd.grad(y.sum(), _leaf(y), create_graph=True)
    return y + grad.square().mean()


def _leaf(y: torch.Tensor) -> torch.Tensor:
    """The first parameter that `y` was made of."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf: torch.Tensor = node.variable
            return leaf
        waiting.extend(next for next, _ in node.next_functions)
    raise AssertionError("no parameter")


def aliased(part: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`.data` and `detach`, of which torch tells a mode as of a result that it saves."""
    y = part()
    return y * y.data + y.detach().sin()


@pytest.mark.parametrize("within", [penalised, aliased])
def test_forwards_in_which_they_must_not_rest_are_the_same_by_both_engines(within: Callable) -> None:
    graph = observed_graph(made(within))
    for lives in (recompute_everything(graph), ()):
        for ours, reference in zip(steps(made(within), graph, lives), by_python(made(within), graph, lives), strict=True):
            assert ours._replace(native_ops=0) == reference


def test_hooks_wake_where_an_op_fails() -> None:
    def fails(part: Callable[[], torch.Tensor]) -> torch.Tensor:
        y = part()
        return y @ torch.ones(3, 3) if failing else y

    failing = False
    model, x = made(fails)()
    learned = Learned(Program(observed_graph(made(fails)), ()))
    for _ in range(2):
        planned(model, learned, x)[0].backward()
    failing = True
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        planned(model, learned, x)
    assert not is_tracing()


def test_they_rest_after_a_forward_that_was_interrupted_as_it_began() -> None:
    """The interrupt comes as the call that begins it returns, before Python knows that it has begun."""
    native = engine.loaded()

    def interrupts(frame: FrameType, event: str, called: object) -> None:
        if event == "c_return" and called == native.begin:
            raise KeyboardInterrupt

    model, x = made()()
    learned = Learned(Program(observed_graph(made()), ()))
    planned(model, learned, x)[0].backward()
    sys.setprofile(interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            planned(model, learned, x)
    finally:
        sys.setprofile(None)
    assert native.under_way() == 0
    assert planned(model, learned, x)[1]


def test_nested_forwards_call_all_hooks() -> None:
    """Both see the ops of the inner one; what the outer plan handles says nothing of the inner plan's saves."""
    inner, x = made()()
    graph = observed_graph(made())
    learned = Learned(Program(graph, recompute_everything(graph)))
    handles: list[int] = []

    def inside() -> torch.Tensor:
        recorded = PlannedEngine(learned)
        with PlannedRecording(recorded, inner):
            loss: torch.Tensor = inner(x)
            handles.append(sum(version.holding.handles for version in recorded.tape.versions.values()))
        return loss

    for _ in range(3):
        inside().backward()
    alone = handles[-1]
    assert alone > 0
    outer, _ = made(lambda part: part() + inside())()
    around = Learned(Program(observed_graph(made(lambda part: part() + inner(x))), ()))
    for _ in range(4):
        planned(outer, around, x)[0].backward()
        assert handles[-1] == alone


def test_references_to_hooks_are_renewed() -> None:
    """Nodes that outlive a forward drop references that were not counted in it: the number must not fall to zero."""
    model, x = made()()
    graph = observed_graph(made())
    learned = Learned(Program(graph, recompute_everything(graph)))
    unpack = engine.loaded().unpack
    ctypes.c_ssize_t.from_address(id(unpack)).value = 1000  # as after many forwards
    planned(model, learned, x)[0].backward()
    assert sys.getrefcount(unpack) > 1 << 28
