"""Random nets whose forwards differ from the forward of their plan: other branches, extra and missing ops, writes through
`.data`, memory that is handed out.

Plans rebuild tensors, park them, or do both. Backward runs once, twice, in parts, or as a double backward. Gradients and the
state of the generator are those of the plain step, or the error is that of plain autograd.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, lower, validate
from lightning_memopt.runtime import Program
from lightning_memopt.solvers.offload.trips import Trip, gaps, send_away
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.stepped import Stepped, held, same

WIDTH = 16

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    lambda t: t.exp().tanh(),
    torch.tanh,
    torch.relu,
    lambda t: t * 2,
    lambda t: t.t().contiguous().t(),
    torch.sigmoid,
    lambda t: torch.where(t > 0, t, t * 0.1),
    lambda t: t.clone().mul_(1.5),
    lambda t: t.square().add_(1),
    lambda t: F.dropout(t, 0.3),
    lambda t: t[:, torch.arange(WIDTH - 1, -1, -1)],
    lambda t: t.softmax(1),
    lambda t: F.layer_norm(t, (WIDTH,)),
    lambda t: t.cumsum(0).tanh(),
    lambda t: t.reshape(-1).view_as(t).exp().clamp(max=3).tanh(),
]


class Random(nn.Module):
    """The net of a seed; `turn`, if not 0, decides where and how this forward differs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed, self.turn = seed, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.x = torch.randn(8, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self) -> Tensor:
        draw = random.Random(self.seed)
        other = random.Random(self.seed * 1000 + self.turn) if self.turn else None
        pool = [self.layers[0](self.x)]
        for _ in range(draw.randrange(6, 16)):
            kind, a = draw.random(), pool[draw.randrange(len(pool))]
            op, layer, b = draw.randrange(len(UNARY)), draw.randrange(3), pool[draw.randrange(len(pool))]
            drops, dropped = draw.random() < 0.3, draw.randrange(99)
            if other is not None and other.random() < 0.15:
                how = other.randrange(7)
                if how == 1:
                    continue
                if how == 0:
                    op, kind = other.randrange(len(UNARY)), 0
                self.differs(how, a, b, pool)
            if kind < 0.5:
                pool.append(UNARY[op](a))
            else:
                pool.append(self.layers[layer](a) if kind < 0.7 else torch.tanh(a * b))
            if drops and len(pool) > 2:
                pool.pop(dropped % (len(pool) - 1))
        return sum(p.mean() for p in pool[-3:])  # type: ignore[return-value]

    def differs(self, how: int, a: Tensor, b: Tensor, pool: list[Tensor]) -> None:
        if how == 2:
            pool.append(torch.tanh(a.cos() * b))
        elif how == 3:
            a.data.mul_(0.5)
        elif how == 4:
            self.kept.append(a)
        elif how == 5:
            a.detach().numpy()
        elif how == 6:
            pool.append(a.square().sin()[:, :])


def trips(one: Stepped, base: tuple[Life, ...], draw: random.Random) -> list[Trip]:
    """Park most of the tensors that may be parked, each for a random part of its gap, in one of the exact forms."""
    graph: Graph = one.graph
    read = {t for op in lower(graph, base).rebuilt for t in graph.ops[op].inputs}
    found = []
    for t, gap in gaps(graph, base).items():
        asked = (s for s in graph.saves if s.tensor in graph.producers)
        back = draw.choice(sorted({gap.needed, *(p for s in asked for p in s.unpacked_at if gap.leaves < p <= gap.needed)}))
        last = min(back, graph.backward_begins) - 1
        if draw.random() < 0.2 or last < gap.leaves:
            continue
        form = "disk"
        if graph.tensors[t].dtype == "bool":
            form = draw.choice(["bools", "bools@disk", "disk"])
        elif one.made_by("relu")(t) and len(graph.saves_of.get(t, ())) == 1 and t not in read:
            form = draw.choice(["positive", "positive@disk"])
        form = form if one.accepts(t, form) else "disk"
        found.append(Trip(gap, draw.randint(gap.leaves, last), back, form, one.parked_nbytes(t, form)))
    return found


def backward(one: Stepped, loss: Tensor, how: int) -> None:
    parameters = list(one.model.parameters())
    if how == 0:
        loss.backward()
    elif how == 1:
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == 2:
        loss.backward(inputs=parameters[:2], retain_graph=True)
        loss.backward()
    else:
        grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in grads if g is not None and g.requires_grad)
        if isinstance(total, Tensor):
            total.backward()


def ran(one: Stepped, program: Program | None, how: int, verify: bool) -> list[Tensor] | str:
    loss = one.forward(program, verify=verify)
    one.model.kept.clear()  # type: ignore[operator]
    try:
        backward(one, loss, how)
    except UnsupportedError:
        return "refused"
    except RuntimeError as error:
        return str(error)[:40]
    return one.outcome(loss)


# (seed, held, turn, backward) of cases that failed once. Gradients or the generator were wrong, without an error; in the last
# three cases a step was refused. Causes: a random op ran again although its state had not been recorded; tensors that had been
# made were made once more, under the same name; memory written through `.data` had been met before, under another version
# counter.
FOUND = [
    (94, 3, 12, 0),
    (102, 2, 13, 1),
    (124, 3, 16, 3),
    (155, 4, 22, 1),
    (212, 2, 12, 0),
    (3758, 3, 596, 0),
    (3795, 3, 20, 0),
    (5256, 4, 816, 0),
]


@pytest.mark.parametrize("seed, every, last, how", FOUND)
def test_forwards_that_were_wrong(seed: int, every: int, last: int, how: int) -> None:
    model = Random(seed)
    one = Stepped(model, model)
    base = held(one.graph, every)
    for lives in (base, send_away(base, trips(one, base, random.Random(seed)))):
        program = Program(one.graph, lives)
        for turn in (0, 0, *range(last - 2, last + 1)):
            model.turn = turn
            assert same(ran(one, None, how, False), ran(one, program, how, False)), turn  # type: ignore[arg-type]
    one.depot.close()


@pytest.mark.parametrize("seed", range(8))
def test_forwards_that_leave_their_plan(seed: int) -> None:
    draw = random.Random(seed)
    model = Random(seed)
    one = Stepped(model, model)
    refused = 0
    for base in (keep_all(one.graph), held(one.graph, draw.choice([1, 2, 3, 4]))):
        lives = send_away(base, trips(one, base, draw))
        program = Program(one.graph, lives)
        assert validate(one.graph, lives, program.schedule).ok
        for turn in (0, 0, *range(1, 6)):
            model.turn = turn
            how = draw.randrange(4)
            expected, found = ran(one, None, how, False), ran(one, program, how, verify=True)
            if found == "refused" and turn and how:
                refused += 1  # a second backward of a forward that left the plan may need what was let go
            elif isinstance(expected, str) or isinstance(found, str):
                assert expected == found, (turn, how)
            else:
                assert same(expected, found), (turn, how)
    assert refused <= 2
    one.depot.close()
