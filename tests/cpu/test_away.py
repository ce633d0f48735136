"""What goes away and comes back, executed: same bits, bytes really gone, and the rules of `runtime/away.py` (A1 to A6)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.errors import ModifiedError, OffloadError
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life, lower, simulate, validate
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.runtime.away import Depot
from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers.baselines import recompute_everything
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.solvers.trips import Form, Planner, send_away
from lightning_memopt.trace import metered_cpu
from tests.cpu.loops import batches, loss_of, small

CPU = torch.device("cpu")


class Free:
    """A link that takes no time: trips are as large as gaps."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return 0.0

    in_seconds = encode_seconds = decode_seconds = out_seconds


class Stepped:
    """A model, one batch, and its step: plain, observed, or under a program."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], room: int = 1 << 24) -> None:
        self.model, self.loss = model, loss
        self.depot = Depot({"disk": DiskTier(room)})
        self.buffers = {n: b.clone() for n, b in model.named_buffers()}
        self.graph = self.observed()
        self.resident = resident_nbytes(self.graph)

    def _begin(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for n, b in self.model.named_buffers():
                b.copy_(self.buffers[n])
        torch.manual_seed(3)

    def observed(self) -> Graph:
        for _ in range(2):
            self._begin()
            observation = Observation(self.model, [], CPU, None, verify=False, meter=True)
            with observation.begin_round(()):
                loss = self.loss()
            observation.forward_ended()
            loss.backward()
            del loss
            graph = observation.finish()
            assert graph is not None
        return graph

    def forward(self, program: Program | None, verify: bool = True) -> Tensor:
        self._begin()
        if program is None:
            return self.loss()
        self.engine = PlannedEngine(program, verify=verify, depot=self.depot)
        with PlannedRecording(self.engine, self.model):
            loss = self.loss()
        self.replayed = self.engine.replayed
        del self.engine
        return loss

    def outcome(self, loss: Tensor) -> list[Tensor]:
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return [loss.detach(), *grads, *(b.clone() for b in self.model.buffers()), torch.get_rng_state()]

    def step(self, program: Program | None = None) -> list[Tensor]:
        loss = self.forward(program)
        loss.backward()
        return self.outcome(loss)

    def peak_nbytes(self, program: Program) -> int:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with metered_cpu() as events:
            loss = self.forward(program, verify=False)
            loss.backward()
            del loss
        return events.peak_nbytes + self.resident

    def away(self, base: tuple[Life, ...] | None = None, form: str = "disk", least: int = 1024) -> Program:
        """The lives of a plan (of the unmodified step) with everything away for as long as it can be."""
        lives = keep_all(self.graph) if base is None else base
        planner = Planner(self.graph, lives, Free())
        tensors = self.graph.tensors
        forms: dict[int, Form] = {t: (form, tensors[t].nbytes) for t in planner.gaps if tensors[t].nbytes >= least}
        found = send_away(lives, planner.plan(forms))
        report = validate(self.graph, found, lower(self.graph, found))
        assert report.ok, report.problems[:3]
        return Program(self.graph, found)

    def used_nbytes(self) -> int:
        return self.depot.tiers["disk"].used_nbytes  # type: ignore[attr-defined]


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    model, (batch,) = small(width=64, depth=4), batches(1)
    found = Stepped(model, lambda: loss_of(model, batch))
    yield found
    found.depot.close()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def held(graph: Graph, every: int) -> tuple[Life, ...]:
    """A plan that rebuilds most and holds every so many of what it may."""
    requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
    made = [t for _, t in requests if t in graph.producers and t not in graph.overwritten]
    roll = Rollout(graph)
    roll.serve(requests, {*made[::every], *unrepeatable(graph)})
    return roll.lives()


def test_bits_and_bytes(stepped: Stepped) -> None:
    """Offloaded alone: equal, far below the unmodified peak, and as predicted by the allocator."""
    expected, program = stepped.step(), stepped.away()
    for _ in range(3):
        assert same(expected, stepped.step(program))
    before = simulate(stepped.graph, keep_all(stepped.graph)).predicted.peak_bytes
    predicted = simulate(stepped.graph, program.lives).predicted.peak_bytes
    assert predicted < 0.75 * before
    assert abs(stepped.peak_nbytes(program) - predicted) <= 0.01 * predicted
    assert stepped.used_nbytes() == 0 and stepped.depot.moved_nbytes > 0


@pytest.mark.parametrize("every", [2, 3, 5])
def test_together_with_recomputation(stepped: Stepped, every: int) -> None:
    """Rebuilds start from what was fetched; part of what is held for rebuilds alone goes away too."""
    expected = stepped.step()
    base = held(stepped.graph, every)
    program = stepped.away(base)
    assert program.away and program.schedule.replayed
    for _ in range(3):
        assert same(expected, stepped.step(program))
    predicted = simulate(stepped.graph, program.lives).predicted.peak_bytes
    assert predicted <= simulate(stepped.graph, base).predicted.peak_bytes
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
    shared = [t for t in program.away if len(stepped.graph.saves_of.get(t, ())) >= 3]
    assert shared
    moved = stepped.depot.moved_nbytes
    assert same(expected, stepped.step(program))
    assert stepped.depot.moved_nbytes - moved == 2 * sum(tensors[t].nbytes for t in program.away)
    stepped.depot.close()


def test_what_is_changed_in_place_raises_as_autograd_does() -> None:
    """A3: the version counter of what was saved, not of what comes back."""
    w = nn.Parameter(torch.ones(512))
    holder = nn.ParameterList([w])
    keep: list[Tensor] = []

    def loss() -> Tensor:
        h = w * 2
        keep[:] = [h]
        return (h * h).sum()

    stepped = Stepped(holder, loss)
    program = stepped.away(least=1)
    found = stepped.forward(program)
    assert not program.away or keep
    keep[0].detach().add_(1)
    with pytest.raises((RuntimeError, ModifiedError), match="modified by an inplace operation"):
        found.backward()
    stepped.depot.close()


def test_a_second_backward_fetches_again(stepped: Stepped) -> None:
    """A4: with `retain_graph` everything comes back twice; then the tier is empty."""
    program = stepped.away()
    loss = stepped.forward(None)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = stepped.outcome(loss)
    loss = stepped.forward(program)
    loss.backward(retain_graph=True)
    assert stepped.used_nbytes() > 0
    loss.backward()
    assert same(expected, stepped.outcome(loss))
    del loss
    assert stepped.used_nbytes() == 0


def test_backward_on_another_thread(stepped: Stepped) -> None:
    expected, program = stepped.step(), stepped.away(held(stepped.graph, 3))
    loss = stepped.forward(program)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert same(expected, stepped.outcome(loss))


def test_no_backward_leaves_nothing(stepped: Stepped) -> None:
    """A6: a loss that is dropped takes its bytes out of the tier."""
    program = stepped.away()
    loss = stepped.forward(program)
    assert stepped.used_nbytes() > 0
    del loss
    assert stepped.used_nbytes() == 0


def test_a_full_tier_says_so_and_loses_nothing() -> None:
    """The error names the tensor and the bytes; the model trains on."""
    model, (batch,) = small(width=64, depth=4), batches(1)
    stepped = Stepped(model, lambda: loss_of(model, batch), room=1 << 16)
    expected, program = stepped.step(), stepped.away()
    with pytest.raises(OffloadError, match="bytes"):
        stepped.step(program)
    gc.collect()
    assert stepped.used_nbytes() == 0
    assert same(expected, stepped.step())
    assert same(expected, stepped.step(Program(stepped.graph, recompute_everything(stepped.graph))))
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
        assert len(stepped.replayed) == predicted.replayed_ops
        assert abs(stepped.peak_nbytes(program) - predicted.peak_bytes) <= 0.01 * predicted.peak_bytes
    stepped.depot.close()
