"""Hazards of call structure and hooks (E), while tensors are away: EXACT.

Cases in which it matters where a saved tensor is when it is asked for, under plans in which everything is away that may be: in
a file, with recomputation, as one bit where only the sign is read back (`positive`), masks packed (`bools`). Hooks, transforms
and threads by themselves are in tests/cpu/hazards/test_hazards_e_*.py. What is around a forward, and what is refused:
tests/cpu/hazards/test_hazards_e_away_around.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from lightning_memopt.runtime import Program
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.models import data
from tests.cpu.lib.stepped import Stepped, held, same

WIDTH = 16
X = data(24, WIDTH)


class Body(nn.Module):
    """Layers with a ReLU of which only the sign is saved, and a mask; subclasses put the hazard into `between`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen: list[Any] = []

    def between(self, h: Tensor, i: int) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = self.between(torch.tanh(layer(x)).exp(), i)
            h = torch.relu(h - 1) + 0.25
            x = torch.where(h > 0.5, h.sin(), h * 0.5)
        return x


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().sum()  # type: ignore[no-any-return]


def stepped(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> Stepped:
    return Stepped(model, loss or partial(loss_of, model))


def programs(one: Stepped) -> Iterator[Program]:
    """Everything away, alone and with recomputation; what is read for its sign; masks."""
    yield one.away(least=1)
    yield one.away(held(one.graph, 2), least=1)
    yield one.away(form="positive", least=1, only=one.made_by("relu"))
    yield one.away(form="bools@disk", least=1)


Use = Callable[[Stepped, Program | None], list[Tensor]]


def exact_while_parked(one: Stepped, use: Use = Stepped.step, times: int = 2) -> None:
    """`use` gives the same bits under all programs as without, several times, and leaves nothing in the tier."""
    expected = use(one, None)
    try:
        for program in programs(one):
            for _ in range(times):
                assert same(expected, use(one, program)), [form for form in set(program.parked.values())]
                assert one.used_nbytes() == 0
        assert one.depot.moved_nbytes > 0
    finally:
        one.depot.close()


# -- what a forward does -----------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """E11, E12: reads its saved tensors twice, saves an input and an output, and stashes one on the context."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.exp() * 0.5
        ctx.save_for_backward(x, y)
        ctx.stash = x.sin()
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * (y + again.cos() * x) + ctx.stash * 0.1 * grad


class Dirty(torch.autograd.Function):
    """E12: works in place."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def hooks_around_ours(self: Body, h: Tensor, i: int) -> Tensor:
    """What was saved before the user's hooks were entered is ours; so is what comes after them."""
    y = h.sin() * h
    with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        z = y.exp()
    return z * y


def tensor_hooks(self: Body, h: Tensor, i: int) -> Tensor:
    y = h.sin()
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda g: tuple(x * 0.5 for x in g))
    y.grad_fn.register_hook(lambda gi, go: tuple(None if x is None else x * 1.5 for x in gi))
    z = y.exp()
    torch.autograd.graph.register_multi_grad_hook((y, z), lambda gs: self.seen.append(len(gs)))
    self.kept = y
    return z


def gradient_inside(self: Body, h: Tensor, i: int) -> Tensor:
    y = h.sin() * h
    (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + 0.1 * g.square()


def reads_saved(self: Body, h: Tensor, i: int) -> Tensor:
    """E10: in the middle of the forward."""
    y = h.exp()
    assert y.grad_fn is not None
    assert same_bits(y.grad_fn._saved_result, y)
    return y.sin()


def selective(self: Body, h: Tensor, i: int) -> Tensor:
    """E14: torch's selective checkpointing, which has a dispatch mode and hooks of its own."""
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
    return checkpoint(lambda t: (t.sin().exp() * t).sin(), h, use_reentrant=False, context_fn=context)  # type: ignore[no-any-return]


def late_checkpoint(self: Body, h: Tensor, i: int) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(lambda t: F.dropout(t.sin().exp(), 0.2), h, use_reentrant=False)  # type: ignore[no-any-return]


CASES: dict[str, Callable[[Body, Tensor, int], Tensor]] = {
    "E9 gradient inside": gradient_inside,
    "E10 saved attributes": reads_saved,
    "E11 E12 custom function": lambda self, h, i: Dirty.apply(Twice.apply(h).sin() + 1).exp(),
    "E13 checkpoint": lambda self, h, i: checkpoint(lambda t: F.dropout(t.sin().exp(), 0.2), h, use_reentrant=False),  # type: ignore[return-value]
    "E13 reentrant": lambda self, h, i: checkpoint(lambda t: F.dropout(t.sin().exp(), 0.2), h, use_reentrant=True),  # type: ignore[return-value]
    "E13 no early stop": late_checkpoint,
    "E14 selective": selective,
    "E14 hooks around": hooks_around_ours,
    "E20 tensor and node hooks": tensor_hooks,
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_does(name: str) -> None:
    """EXACT; hooks of the user see what they would see, as often."""

    class Model(Body):
        between = CASES[name]

    one = stepped(Model())
    counts: dict[bool, set[tuple[Any, ...]]] = {True: set(), False: set()}

    def use(one: Stepped, program: Program | None) -> list[Tensor]:
        one.model.seen = []  # type: ignore[assignment]
        found = one.step(program)
        counts[program is None].add(tuple(one.model.seen))  # type: ignore[arg-type]
        return found

    exact_while_parked(one, use)
    assert counts[True] == counts[False]
