"""What the library does on CUDA, as far as it can be seen without: `torch.cuda` is replaced where the library calls it."""

from __future__ import annotations

import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device import places
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.cuda import Cuda
from lightning_memopt.errors import InfeasibleError, MemOptError
from lightning_memopt.graph import BEFORE, resident_nbytes
from lightning_memopt.plan import Machine, Rebuild, read_plan, simulate
from lightning_memopt.record import Rule, numeric_flags, register_op, rule_of, rule_of_call, set_numeric_flags
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.engine.holding import Holding, in_order
from lightning_memopt.session import Session
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.measure.peak_meter import StepMeter
from lightning_memopt.session.observe.costs import Costs
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.trace import memory, tracer
from lightning_memopt.trace.memory import TimedOps
from tests.cpu.lib.harness import assert_exact, outcome
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train
from tests.cpu.lib.models import Body, Layer, X, data, made, verified

CUDA = torch.device("cuda", 0)


def test_a_random_op_draws_from_the_generator_of_its_device(monkeypatch: Any) -> None:
    """A factory reads no tensor: its device is where it is told to make its result."""
    generators = torch.Generator(), torch.Generator()
    module = types.SimpleNamespace(default_generators=generators, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    cpu = torch.device("cpu")
    assert places.device_of_call([], {"device": "cuda"}) == torch.device("cuda")
    assert places.device_of_call([CUDA], {"device": cpu}) == cpu
    assert places.device_of_call([cpu, CUDA], {}) == CUDA and places.device_of_call([cpu], {"device": None}) == cpu
    assert places.generator_of(CUDA) is generators[0]
    assert places.generator_of(torch.device("cuda")) is generators[1]
    assert places.generator_of(cpu) is torch.default_generator
    assert places.generator_of(torch.device("cuda", 5)) is None


class Stream:
    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_rebuilt_value_is_put_in_the_order_of_the_stream_that_reads_it(monkeypatch: Any) -> None:
    one, other = Stream(), Stream()
    now = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    recorded: list[Stream] = []
    slot = Holding()
    slot.value = types.SimpleNamespace(is_cuda=True, device=CUDA, record_stream=recorded.append)  # type: ignore[assignment]
    in_order(slot)  # made by the forward: the user has put it in order, only its memory must not be used again too early
    assert recorded == [one] and one.waited == []
    in_order(slot)
    now[0] = other
    in_order(slot)
    assert recorded == [one, other] and other.waited == [one] and slot.stream is other


def test_what_is_said_of_a_stream_is_no_write() -> None:
    rule = rule_of(torch.ops.aten.record_stream.default)
    assert rule.writes == () and rule.handling == "opaque"


def test_steps_that_are_captured_are_left_alone(monkeypatch: Any) -> None:
    model = small()
    session = Session(model, [], MemOptConfig(budget="min", verbose=False))
    monkeypatch.setattr(session, "device", CUDA)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert session._applies() is not capturing
    session.close()


class Device:
    """Ops that take 1 ms each and 4096 bytes at their worst, on a device where 10000 bytes are in use."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        self.resets = self.synchronised = self.asked = 0
        self.idle = False
        self.blocks: list[dict[str, Any]] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                device.now += 0.5
                self.at = device.now

            def query(self) -> bool:
                return device.idle

            def elapsed_time(self, other: Event) -> float:
                assert device.synchronised
                return 2 * (other.at - self.at)

        for name, value in {
            "Event": Event,
            "current_stream": lambda device=None: None,
            "reset_peak_memory_stats": self.reset,
            "synchronize": self.synchronize,
            "memory_stats_as_nested_dict": self.stats,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Cuda, "segments", lambda _: [{"blocks": self.blocks}])

    def reset(self, device: Any) -> None:
        self.resets += 1

    def synchronize(self, device: Any) -> None:
        self.synchronised += 1

    def stats(self, device: Any) -> Any:
        self.asked += 1
        return {
            "requested_bytes": {"all": {"current": 10000, "peak": 14096}},
            "allocation": {"all": {"allocated": self.asked, "freed": 0}},
        }


def observed(model: Any) -> Any:
    observation = Observation(model, [], CUDA, None, verify=False, meter=True)
    with observation.begin_round(()):
        loss = model(data(4, 16)).sum()
    observation.forward_ended()
    loss.backward()
    graph = observation.finish()
    assert graph is not None
    return graph


def test_ops_are_timed_by_events_and_what_nobody_knows_is_counted(monkeypatch: Any) -> None:
    device = Device(monkeypatch)
    graph = observed(made(Body))
    assert {op.seconds for op in graph.ops} == {1e-3} and graph.step_seconds == pytest.approx(1e-3 * len(graph.ops))
    assert {op.workspace_nbytes for op in graph.ops} == {4096}
    assert device.resets == len(graph.ops) and device.synchronised == 1, "ops are not waited for one by one"
    assert device.asked == len(graph.ops) + 1, "once for each op, and once before the step"
    unseen = [t for t in graph.tensors if t.name == "held outside of the step"]
    assert [(t.nbytes, t.born_at, t.freed_at) for t in unseen] == [(10240, BEFORE, len(graph.points) - 1)]
    assert resident_nbytes(graph) == 10240
    plan = planner.solve(graph).plan(1 << 40)
    assert plan.predicted.reserved_nbytes >= plan.predicted.peak_nbytes >= 10240 + 4096


@pytest.mark.parametrize("older", [True, False])
def test_what_was_there_before_and_is_met_late_is_counted_once(older: bool, monkeypatch: Any) -> None:
    """Buckets of DDP: C++ holds them, and the recorder meets them in backward. What was made since is not part of the rest."""
    device = Device(monkeypatch)
    monkeypatch.setattr(tracer, "is_on", lambda device, other: True)
    bucket = torch.ones(100)
    state = "active_allocated" if older else "inactive"
    device.blocks = [{"address": bucket.untyped_storage().data_ptr(), "state": state}]

    class Meets(Body):
        def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
            return h + bucket[:16]

    graph = observed(made(Meets))
    (unseen,) = (t for t in graph.tensors if t.name == "held outside of the step")
    assert unseen.nbytes == (10240 - 512 if older else 10240)


@pytest.mark.parametrize(("idle", "expected"), [(False, [1e-3] * 3), (True, [1e-3, 1e-6, 4e-4])])
def test_on_an_idle_device_the_launch_is_no_part_of_an_op(idle: bool, expected: list[float], monkeypatch: Any) -> None:
    """Between an op's two events, a device without other work waits for the host. What it does before the first op is
    unknown.
    """
    device, ops = Device(monkeypatch), TimedOps(backend_of(CUDA))
    device.idle = idle
    clock = iter([0.0, 6e-4, 1.0, 1.0 + 2e-3, 2.0, 2.0 + 6e-4])
    monkeypatch.setattr(memory, "perf_counter", lambda: next(clock))
    for index in range(3):
        ops.begin(index)
        ops.end()
    assert ops.seconds(3) == pytest.approx(expected)


def test_only_what_the_host_takes_longer_than_the_device_is_lost(monkeypatch: Any) -> None:
    Device(monkeypatch)
    program = Program(observed(made(Body)), ())
    assert Costs(1e-3, 0, 0, 0, eager=1e-6).of(program) == 0, "nothing is dropped"
    graph = program.graph
    program = Program(graph, recompute_everything(graph))
    again = sum(isinstance(s, Rebuild) for steps in program.schedule.segments.values() for s in steps)
    assert again > 0
    ops, forward = len(graph.ops), len(graph.forward)
    assert Costs(1e-3, 0, 0, 0).of(program) == pytest.approx(1e-3 * forward)
    assert Costs(1e-4, 0, 0, 0, eager=1e-4).of(program) == 0, "the device is busy for longer"
    slow = Costs(1e-3, 0, 0, 0, eager=1e-3).of(program)
    assert slow == pytest.approx(1e-3 * (forward + ops + again) - 1e-3 * (ops + again))


def test_a_planned_step_is_measured_from_an_empty_cache(monkeypatch: Any) -> None:
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: calls.append(name) or 7)
    meter = StepMeter(CUDA, 0)
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert meter.close() == 7 and calls[-1] == "max_memory_reserved"


def test_how_matrix_products_are_added_up_is_noted_and_put_back() -> None:
    before = numeric_flags()
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = not matmul.allow_bf16_reduced_precision_reduction
    try:
        assert numeric_flags() != before
        set_numeric_flags(before)
        assert numeric_flags() == before
    finally:
        set_numeric_flags(before)


def test_what_an_allocator_reserves_decides_is_shown_and_is_kept_in_the_file(monkeypatch: Any, tmp_path: Any) -> None:
    """A device that reserves 40000 bytes more than are allocated, whatever the plan."""
    more = 40000

    def reserves(machine: Machine, graph: Any) -> Any:
        return lambda lives: simulate(graph, lives).predicted.peak_nbytes + more

    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as plain:
        train(model, optimizer, batches(4))
    monkeypatch.setattr(Machine, "reserve", reserves)
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(4))
    frontier, before = run.status().frontier, plain.session.status().frontier
    assert frontier is not None and before is not None and run.plan is not None
    needed, needed_before = (f.smallest_nbytes - resident_nbytes(f.graph) for f in (frontier, before))
    assert needed == needed_before + more
    assert run.plan.predicted.reserved_nbytes == run.plan.predicted.peak_nbytes + more == run.plan.predicted.needed_nbytes
    assert "reserved at the peak, predicted" in run.report() and "reserved at the peak" not in plain.report()
    path = str(tmp_path / "plan.json")
    run.save_plan(path)
    assert read_plan(path)[0].predicted == run.plan.predicted
    with pytest.raises(InfeasibleError, match="above the budget"):
        with optimize(small(), sgd(small()), budget=run.plan.predicted.peak_nbytes + more // 2, plan=path, verbose=False):
            pass
    state = state_of(run)
    assert isinstance(state, Running)
    budget = frontier.unmodified_peak_nbytes
    above = Running(frontier.plan(frontier.unmodified_peak_nbytes + more), state.program.graph, frontier)
    found = above.measured(budget + 5000, None, budget, MemOptConfig(verbose=False), lambda text: None)
    assert found is not above and found.plan.predicted.reserved_nbytes <= budget - 5000


_calls: list[int] = []
_lib = torch.library.Library("memopt_test_cuda", "DEF")
_lib.define("seeded(Tensor x) -> (Tensor, Tensor)")


def _seeded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _calls.append(len(_calls))
    return x.sin(), torch.full((2,), float(len(_calls)))


_lib.impl("seeded", _seeded, "CPU")


class Attention(torch.autograd.Function):
    """Saves two results: running the op again makes the first one, but not the second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, seed = torch.ops.memopt_test_cuda.seeded(x)
        ctx.save_for_backward(y, seed)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y, seed = ctx.saved_tensors
        return grad * y * seed.sum()


@pytest.mark.parametrize("op", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"])
def test_attention_draws_numbers_where_it_drops(op: str) -> None:
    func = getattr(torch.ops.aten, f"_scaled_dot_product_{op}").default
    place = [a.name for a in func._schema.arguments].index("dropout_p")
    for chance, handling in ((0.0, "pure"), (0.1, "random")):
        assert rule_of_call(func, (*[None] * place, chance), {}).handling == handling
        assert rule_of_call(func, (), {"dropout_p": chance}).handling == handling
    assert rule_of_call(func, (), {}).handling == "pure", "the default"
    assert rule_of_call(torch.ops.aten.native_dropout.default, (None, 0.1, True), {}).handling == "random"


def test_results_that_no_kernel_writes_are_kept() -> None:
    """Attention's seeds without dropout: a second run leaves other bytes there, and everything else is as it was."""
    for op, makes in (("flash", 2), ("efficient", 1), ("cudnn", 2)):
        assert rule_of(getattr(torch.ops.aten, f"_scaled_dot_product_{op}_attention").default).makes == makes
    register_op(torch.ops.memopt_test_cuda.seeded.default, Rule("pure", makes=1))
    found = []
    for drop in (False, True):
        _calls.clear()
        found.append(outcome(made(lambda: Layer(lambda x, w: Attention.apply(x @ w))), lambda m: m(X).sum(), drop=drop))
        assert len(_calls) == 1 + drop, "it ran again for what was dropped"
    assert_exact(*found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verified(made(lambda: Layer(lambda x, w: Attention.apply(x @ w))), lambda m: m(X).sum()).opaque_ops


def test_the_step_that_verifies_is_not_judged_by_what_its_checksums_take() -> None:
    """On CUDA the next step is measured, too. Far above the budget, the first one is judged."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(4))
    state = state_of(run)
    assert isinstance(state, Running)
    graph, plan = replace(state.program.graph, device="cuda"), state.plan
    quiet = MemOptConfig(verbose=False, on_exceed="raise")

    def step(running: Running, above_nbytes: int) -> None:
        running.step_ended(lambda text: None, None)
        running.measured(plan.budget_nbytes + above_nbytes, None, plan.budget_nbytes, quiet, lambda text: None)

    running = Running(plan, graph, state.frontier)
    step(running, 2 << 20)
    assert running.peaks.measured_nbytes is None and running.measures
    with pytest.raises(MemOptError, match="above the budget"):
        step(running, 2 << 20)
    with pytest.raises(MemOptError, match="above the budget"):
        step(Running(plan, graph, state.frontier), 8 << 20)
