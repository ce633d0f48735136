"""What goes away and comes back, executed: same bits, bytes really gone, and the rules of `runtime/parked.py` (A1 to A6)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.native import engine
from lightning_memopt.plan import saved_in_tiers, simulate, validate
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.loops import batches, loss_of, small
from tests.cpu.lib.planned_engine import engine_of
from tests.cpu.lib.stepped import Stepped, held, same
from tests.cpu.lib.stepped import stepped as stepped_by


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    model, (batch,) = small(width=64, depth=4), batches(1)
    found = Stepped(model, lambda: loss_of(model, batch))
    yield found
    found.depot.close()


def test_bits_and_bytes(stepped: Stepped) -> None:
    """Offloaded alone: equal, far below the unmodified peak, and as predicted by the allocator."""
    expected, program = stepped.step(), stepped.away()
    for _ in range(3):
        assert same(expected, stepped.step(program))
    before = simulate(stepped.graph, keep_all(stepped.graph)).predicted.peak_nbytes
    predicted = simulate(stepped.graph, program.lives).predicted.peak_nbytes
    assert predicted < 0.75 * before
    assert abs(stepped.peak_nbytes(program) - predicted) <= 0.01 * predicted
    assert stepped.used_nbytes() == 0 and stepped.depot.moved_nbytes > 0


@pytest.mark.parametrize("every", [2, 3, 5])
def test_together_with_recomputation(stepped: Stepped, every: int) -> None:
    """Rebuilds start from what was fetched; part of what is held for rebuilds alone goes away too."""
    expected = stepped.step()
    base = held(stepped.graph, every)
    program = stepped.away(base)
    assert program.parked and program.schedule.rebuilt
    for _ in range(3):
        assert same(expected, stepped.step(program))
    predicted = simulate(stepped.graph, program.lives).predicted.peak_nbytes
    assert predicted <= simulate(stepped.graph, base).predicted.peak_nbytes
    assert abs(stepped.peak_nbytes(program) - predicted) <= 0.01 * predicted


def test_a_storage_goes_away_once() -> None:
    """q, k and v of one input: saved three times, moved once each way, and its bytes on the device are gone (A1)."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
    x = torch.randn(64, 256)

    def loss() -> Tensor:
        h = torch.tanh(model[0](x))
        q, k, v = (model[i](h) for i in (1, 2, 3))
        return (q * k + v).square().mean()

    stepped = Stepped(model, loss)
    expected, program = stepped.step(), stepped.away()
    tensors = stepped.graph.tensors
    shared = [t for t in program.parked if len(stepped.graph.saves_of.get(t, ())) >= 3]
    assert shared
    moved = stepped.depot.moved_nbytes
    assert same(expected, stepped.step(program))
    assert stepped.depot.moved_nbytes - moved == 2 * sum(tensors[t].nbytes for t in program.parked)
    stepped.depot.close()


def test_no_backward_leaves_nothing(stepped: Stepped) -> None:
    """A6: a loss that is dropped takes its bytes out of the tier."""
    program = stepped.away()
    loss = stepped.forward(program)
    assert stepped.used_nbytes() > 0
    del loss
    assert stepped.used_nbytes() == 0


@pytest.mark.parametrize("room", [0, 1 << 14, 1 << 16])
@pytest.mark.parametrize("every", [0, 2, 3])
def test_what_a_full_tier_has_no_room_for_stays(stepped: Stepped, room: int, every: int) -> None:
    """With the same bits, rebuilds that start from it included; it is counted. Room that was given back is used again."""
    stepped.depot.close()
    stepped.depot = Depot({"disk": DiskTier(room)})
    expected = stepped.step()
    program = stepped.away(held(stepped.graph, every) if every else None)
    wanted = saved_in_tiers(program.lives)["disk"]
    for _ in range(3):
        moved = stepped.depot.moved_nbytes
        assert same(expected, stepped.step(program))
        assert (stepped.deviation.unparked_nbytes > 0) is (wanted > room)
        assert stepped.deviation.unparked_nbytes <= wanted and stepped.depot.moved_nbytes - moved <= 2 * room
        gc.collect()
        assert stepped.used_nbytes() == 0
    stepped.depot.close()


def test_an_op_that_the_plan_does_not_know_stops_no_rebuild() -> None:
    """A metric that is logged now and then: segments run whole all the same, dropout's empty mask included."""
    model, (batch,) = small(width=64, depth=4), batches(1)
    logged: list[Tensor] = []

    def loss() -> Tensor:
        if logged:
            logged.append(model.head.weight.detach().pow(2).mean())
        return loss_of(model, batch)

    stepped = Stepped(model, loss)
    for lives in (recompute_everything(stepped.graph), held(stepped.graph, 3)):
        logged.clear()
        program = Program(stepped.graph, lives)
        predicted = simulate(stepped.graph, lives).predicted
        expected = stepped.step()
        logged.append(batch[0])
        for _ in range(3):
            assert same(expected, stepped.step(program))
        assert len(stepped.rebuilt) == predicted.rebuilt_ops
        assert abs(stepped.peak_nbytes(program) - predicted.peak_nbytes) <= 0.01 * predicted.peak_nbytes
    stepped.depot.close()


class Sorting(nn.Module):
    """`argsort` drops the sorted values: autograd lets go of what it saved for them before the next op runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(32, 64)

    def forward(self) -> Tensor:
        h = torch.tanh(self.a(self.x))
        picked = self.b(h).gather(1, h.argsort(1)).sin()
        return picked.repeat(1, 8).abs().mean()  # the peak, when everything above is away


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "python"])
def test_what_autograd_lets_go_of_within_the_forward(native: bool) -> None:
    """It is not a deviation. What is packed again, for the next op, is dropped after that op."""
    with contextlib.nullcontext() if native else engine.without(), stepped_by(Sorting()) as one:
        graph = one.graph
        assert any(point.kind == "release" for point in graph.points[: graph.backward_begins])
        expected, program = one.step(), one.away(least=0)
        for _ in range(3):
            assert same(expected, one.step(program))
            assert not one.deviation.out_of_order
        assert one.peak_nbytes(program) == simulate(graph, program.lives).predicted.peak_nbytes


class LossOutside(Stepped):
    """The model's forward is recorded, and what makes a loss of its result is not. Autocast, which keeps its casts of weights
    until it ends, is around both.
    """

    def __init__(self, depth: int = 4) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.x = torch.randn(32, 64)
        super().__init__(model, lambda: self.run(contextlib.nullcontext()))

    def run(self, recording: contextlib.AbstractContextManager[Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with recording:
                h = self.model(self.x)
            return h.repeat(1, 8).sin().float().square().mean()  # its backward is the peak

    def forward(self, program: Program | None, verify: bool = True, sized: bool = True) -> Tensor:
        if program is None:
            return super().forward(None)
        self._begin()
        return self.run(PlannedRecording(engine_of(program, sized, verify=verify, depot=self.depot), self.model))


def test_what_the_loss_frees_goes_away_before_backward() -> None:
    """The plan has the casts until user code lets go of them, after an op of the loss, which nobody records."""
    outside = LossOutside()
    graph, until = outside.graph, {t.id: t.freed_at for t in outside.graph.tensors}
    loss = next(op.id for op in graph.forward if op.name == "aten::repeat")
    lives = outside.away(least=0, only=lambda t: t in graph.producers and graph.producers[t].id < loss).lives
    ends = (max(life.freed_at, until[life.tensor]) if life.how == "original" else life.freed_at for life in lives)
    program = Program(graph, tuple(replace(life, freed_at=end) for life, end in zip(lives, ends, strict=True)))
    assert validate(graph, program.lives, program.schedule).ok
    assert sum(op > loss for op, _ in program.fences) >= 3
    expected = outside.step()
    for _ in range(3):
        assert same(expected, outside.step(program))
    assert outside.peak_nbytes(program) == simulate(graph, program.lives).predicted.peak_nbytes
    outside.depot.close()


class Recurrent(nn.Module):
    """Cells whose gates are pieces of one storage, written in place: each piece has a version counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.x = nn.GRUCell(64, 64), torch.randn(32, 64)

    def forward(self) -> Tensor:
        h = self.cell(self.x, torch.tanh(self.x))
        return self.cell(torch.tanh(h), h).repeat(1, 8).abs().mean()  # the peak, when everything above is away


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "python"])
def test_the_op_behind_a_fence_reads_pieces_of_what_ran_unrecorded(native: bool) -> None:
    """They are bytes of one storage, and not changed because their counters differ: the forward does not leave the plan."""
    with contextlib.nullcontext() if native else engine.without(), stepped_by(Recurrent()) as one:
        program = one.away(only=one.made_by("clone"))
        behind = {program.names[op + 1] for op, _ in program.fences}
        assert "aten::mul_.Tensor" in behind
        expected = one.step()
        for _ in range(3):
            assert same(expected, one.step(program))
            assert one.deviation.first is None
        assert one.peak_nbytes(program) == simulate(one.graph, program.lives).predicted.peak_nbytes
