"""Steps in which an op that the plan runs again may not run again, has nothing to start from, or makes less than before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.robustness.fuzzing.plans import requests
from lightning_memopt.graph import Graph
from lightning_memopt.native import engine
from lightning_memopt.plan import Life, LoweringError, Schedule, lower, validate
from lightning_memopt.record import rules
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.engine.rejoining import number_of
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.stepped import Stepped, held, same, stepped

WIDTH = 16
ROOM_NBYTES = 64
"""Bytes of scalars that the loop itself holds."""
RUNS = 10
"""Number of plans of a frontier that are executed, about."""


class Noises(nn.Module):
    """The loss of one batch, with noise of a kind. `shorter`: without the op before the noise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.x = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
        self.kind, self.shorter = kind, False

    def forward(self) -> Tensor:
        a = self.layer(self.x)
        b, before = a.cos(), a
        if self.kind == "after another op":
            if not self.shorter:
                before = a.detach().square()
            noise = torch.rand_like(b)
        elif self.kind == "after another noise":
            if not self.shorter:
                before = torch.rand_like(a)
            noise = torch.rand_like(b)
        else:
            before, noise = a.detach().clone(), b.detach().clone()
            if not self.shorter:
                before.uniform_()
            noise.uniform_()
        twice = noise * 2
        return ((b + twice).sin() * twice * before).sum()


def forgetful(graph: Graph) -> Program:
    """A plan that holds `noise * 2`, drops it after its first use, and rebuilds it from the noise for its second use. It also
    holds what was there before the noise.
    """
    producers, held = graph.producers, unrepeatable(graph)
    drawn = [op for op in graph.forward if op.name.startswith(("aten::rand_like", "aten::uniform_"))]
    noise = drawn[-1].outputs[-1]
    twice = next(op.outputs[0] for op in graph.forward if op.name.startswith("aten::mul") and op.inputs == (noise,))
    held |= {op.outputs[-1] for op in drawn[:-1]} - graph.overwritten
    roll, have = Rollout(graph), {*held, twice}
    for request in requests(graph):
        roll.serve([request], have)
        if request[1] == twice:
            have.discard(twice)
    program = Program(graph, roll.lives())
    assert twice in program.holds and noise not in program.holds
    assert {producers[twice].id, producers[noise].id} <= program.schedule.rebuilt.keys()
    return program


def least(graph: Graph) -> Program:
    """A plan that holds only what cannot be rebuilt."""
    roll = Rollout(graph)
    roll.serve(requests(graph), {*unrepeatable(graph)})
    return Program(graph, roll.lives())


KINDS = {"after another op": True, "after another noise": False, "in place": False}
"""Kind of noise -> whether its op has another name than the next op of the plan: then the generator's state is noted."""


@pytest.mark.parametrize("kind", KINDS)
def test_noise_where_the_plan_has_another_op(kind: str) -> None:
    """Without the noise's state, nothing can rebuild what is made from it: it is not dropped, although the plan says so."""
    model = Noises(kind)
    with stepped(model) as step:
        program = forgetful(step.graph)
        (noise,) = program.random
        for model.shorter in (True, False, True, True, False):  # at first without a template of any op
            expected = step.step()
            assert same(expected, step.step(program)), f"shorter: {model.shorter}"
            assert (step.deviation.first is not None) == model.shorter
            if not model.shorter or KINDS[kind]:
                assert number_of(noise) in step.rebuilt


class Added(nn.Module):
    """The loss of one batch. `other`: what is added in place was made by an op that never runs again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.x, self.other = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH), False

    def forward(self) -> Tensor:
        a = self.layer(self.x)
        added = a.sort(0).values if self.other else a.tanh()
        return (a * 2).add_(added).sin().cos().sum()


def test_a_sum_in_place_with_what_never_runs_again() -> None:
    """The tensor that is added is held, so the sum and the ops after it can be rebuilt."""
    model = Added()
    with stepped(model) as step:
        program = least(step.graph)
        sums = [op.id for op in step.graph.forward if op.name.startswith(("aten::add_", "aten::sin"))]
        for model.other in (True, False, True):
            assert same(step.step(), step.step(program)), f"other: {model.other}"
            assert {number_of(op) for op in sums} <= set(step.rebuilt)


class Penalised(nn.Module):
    """The loss of one batch, with two gradients that are taken in the forward. The second one needs `lower`, which is rebuilt
    and stays; then the plan lets go of what it was made from.

    kind: "written": `lower` is overwritten in the forward, and backward starts from its old bytes;
        "unused": in a `shorter` step a tensor that was made from it is not used.
    shorter: see `kind`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.x = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
        self.kind, self.shorter = kind, False

    def slope(self, a: Tensor) -> Tensor:
        energy = self.layer(a).square().sum()
        return torch.autograd.grad(energy, a, retain_graph=True)[0]

    def forward(self) -> Tensor:
        a = self.layer(self.x)
        lower = a - 0.01 * self.slope(a)
        early = lower.tanh()
        late = (lower - 0.01 * self.slope(lower)).tanh()
        if self.kind == "written":
            lower.mul_(1.5)
            return early.sum() + late.sum()
        unused = early.tanh()  # its handle is let go when the forward ends, and events of the plan are passed over
        loss = 0.0 if self.shorter else unused.square().sum()
        return loss + late.square().sum()


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("kind", ["written", "unused"])
def test_what_a_backward_in_the_forward_rebuilt_stays(kind: str, native: bool) -> None:
    """The tensor was made by an op, but cannot be dropped, because the inputs of that op have been freed."""
    model = Penalised(kind)
    with stepped(model) as step, contextlib.nullcontext() if native else engine.without():
        program = least(step.graph)
        made = number_of(next(op.id for op in step.graph.forward if op.name.startswith("aten::sub")))
        for shorter in (False, True, True, False):  # at first without a template of any op
            model.shorter = shorter and kind == "unused"
            assert same(step.step(), step.step(program)), f"shorter: {model.shorter}"
            assert step.deviation.out_of_order == model.shorter
            assert step.rebuilt.count(made) == 1, "the plan makes it once, for the gradient in the forward"


_library = torch.library.Library("memopt_not_rebuilt", "DEF")
_library.define("normed(Tensor x) -> (Tensor, Tensor)")
_is_forward = [True]


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results. A second run leaves the second one unwritten, so nothing may read it then."""
    return x.sin(), x.cos() if _is_forward[0] else torch.full_like(x, torch.nan)


_library.impl("normed", _normed, "CPU")


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, slope = torch.ops.memopt_not_rebuilt.normed(x)
        ctx.save_for_backward(y, slope)
        ctx.mark_non_differentiable(slope)
        return y, slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        y, slope = ctx.saved_tensors
        return grad * slope * y.square().add(1)


class Slopes(nn.Module):
    """The loss of one batch. Of the ops that make two results, or three, a second run makes only the first: autograd saves the
    others, and ops that run again read them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.x = torch.randn(512, WIDTH)

    def forward(self) -> Tensor:
        _is_forward[0] = True
        h = self.x
        for layer in self.layers:
            y, slope = Normed.apply(layer(h))
            h = nn.functional.layer_norm(y * slope.tanh(), (WIDTH,)).exp().tanh()
        loss = h.square().mean()
        _is_forward[0] = False
        return loss


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepped]:
    """The step of `Slopes`."""
    for op in (torch.ops.memopt_not_rebuilt.normed.default, torch.ops.aten.native_layer_norm.default):
        monkeypatch.setitem(rules._registered, op, rules.Rule("pure", makes=1))
    for forget in (rules.rule_of.cache_clear, rules.KNOWN.clear):
        forget()
    with stepped(Slopes()) as step:
        yield step
    monkeypatch.undo()
    rules.rule_of.cache_clear()
    rules.KNOWN.clear()


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_ops_that_make_one_of_their_results_again(slopes: Stepped, native: bool) -> None:
    """The other results are kept under any budget. Bits are those of the plain step, bytes as predicted."""
    graph = slopes.graph
    unrebuilt = {t for op in graph.forward for t in op.unrebuilt}
    assert len(unrebuilt) == 4 * 3 and unrebuilt <= graph.anchors
    candidates = planner.solve(graph).candidates  # how many, and which, depends on measured times
    plans = [least(graph).lives, *(held(graph, every) for every in (2, 3, 5))]
    plans += [c.lives for c in candidates[:: max(1, len(candidates) // RUNS)]]
    again, known = {op.id for op in graph.forward if op.unrebuilt}, set[int]()
    with contextlib.nullcontext() if native else engine.without():
        expected = slopes.step()
        for lives in plans:
            program = Program(graph, lives)
            again -= program.schedule.rebuilt.keys()
            report = validate(graph, lives, program.schedule)
            assert report.ok, report.problems[:3]
            for _ in range(3):  # at first without templates
                assert same(expected, slopes.step(program))
                assert slopes.deviation.first is None
            loss = slopes.forward(program)
            planned = slopes.engine()  # already freed if the plan has no handles
            if planned is not None:
                versions = planned.tape.versions
                assert all(versions[t].call is None for t in unrebuilt if t in versions)
                known |= {t for t in unrebuilt if t in versions}
                del versions
            del planned, loss
            assert abs(slopes.peak_nbytes(program) - report.peak_nbytes) <= ROOM_NBYTES
    assert not again, "each of the ops ran again under some plan"
    assert known == unrebuilt


def test_a_plan_that_rebuilds_what_no_op_makes_again_is_refused(slopes: Stepped) -> None:
    graph = slopes.graph
    (*_, tensor) = (t for op in graph.forward for t in op.unrebuilt if graph.saves_of.get(t))
    (point, until), *_ = graph.reads(tensor)
    rebuilt = Life(tensor=tensor, born_at=point, freed_at=until, how="rebuild")
    lives = tuple(life for life in keep_all(graph) if life.tensor != tensor)
    with pytest.raises(LoweringError, match="no op can make it"):
        lower(graph, sorted((*lives, rebuilt), key=lambda life: (life.tensor, life.born_at)))
    report = validate(graph, (rebuilt,), Schedule(frozenset(), {}, {}, {}))
    assert any("no op makes it again" in problem for problem in report.problems)
