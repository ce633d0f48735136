"""Planned steps that park tensors on the host: which plans park, bits, bytes, the order of copies and kernels, links, a host
that locks no pages, several devices.
Links have given rates where plans are compared, and are slow in real time where rates are measured (`EMULATED_LINK`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.native import engine
from lightning_memopt.plan.rates import Link, MachineRates
from lightning_memopt.session import times
from lightning_memopt.units import round_up
from tests.cpu.lib.times import Known
from tests.emulated import device
from tests.emulated.device import Op
from tests.emulated.training import MODELS, Trained, train

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

BLOCK = 512
"""A graph has the bytes of whole blocks of CUDA's allocator."""
FAST, SLOW = 1e11, 1e6
"""Bytes a second of a link, beside ops that take the times of one core of a CPU."""
TIMES = 2
"""Batches are so many times as large, with which a plan that parks takes fewer segments than the plain step."""
_plain: dict[tuple[str, bool], Trained] = {}


class Linked(Known):
    """Known times, with a link of this rate to the host."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        link = Link(out_bytes_per_second=self.rate, in_bytes_per_second=self.rate)
        return MachineRates(name="given", links={"host": link})


@pytest.fixture(params=["C++", "Python"])
def in_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with engine.without() if request.param == "Python" else contextlib.nullcontext():
        yield


def plain(model: str, autocast: bool) -> Trained:
    if (model, autocast) not in _plain:
        _plain[model, autocast] = train(model, None, autocast, times=TIMES)
    return _plain[model, autocast]


def parked(found: Trained) -> dict[int, int]:
    """By the tensor that the plan parks: its bytes."""
    lives = found.status.plan.lives
    return {life.tensor: life.parked_nbytes for life in lives if life.how == "fetch" and life.form == "host"}


def copies(ops: list[Op], way: str) -> list[Op]:
    """Those of the tier: on streams of their own, to or from page-locked memory."""
    compute = {op.stream for op in ops if op.what.startswith("aten::")}
    return [op for op in ops if op.what == f"copy {way}" and op.stream not in compute]


def log_of_a_step() -> tuple[list[Op], Callable[[], AbstractContextManager[None]]]:
    """What is asked of the device within the context, once it has ended; and the context."""
    ops: list[Op] = []

    @contextlib.contextmanager
    def last() -> Iterator[None]:
        with device.logged() as found:
            yield
        ops.extend(found)

    return ops, last


@pytest.mark.parametrize("rate", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("model", MODELS)
def test_bits_and_bytes(model: str, rate: float, in_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no op may run again, the smallest plan parks at any rate; each byte that it parks is copied out and back once."""
    check_bits_and_bytes(model, False, rate, monkeypatch)


@pytest.mark.parametrize("model", ["dropout, tied weights", "convolutions, BatchNorm"])
def test_bits_and_bytes_under_autocast(model: str, in_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits_and_bytes(model, True, FAST, monkeypatch)


def check_bits_and_bytes(model: str, autocast: bool, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "current", Linked(rate))
    ops, last = log_of_a_step()
    found = train(model, "min", autocast, times=TIMES, last=last, offload="host", recompute=False)
    assert found.status.phase == "planned" and not found.status.deviates
    assert found.same(plain(model, autocast))
    plan, sizes = found.status.plan, sorted(parked(found).values())
    assert sizes and all(sorted(round_up(op.nbytes, BLOCK) for op in copies(ops, way)) == sizes for way in ("out", "in"))
    assert 2 * sum(sizes) == plan.predicted.moved_nbytes
    assert found.allocated == plan.predicted.peak_nbytes < plain(model, autocast).allocated
    assert found.reserved == plan.predicted.reserved_nbytes <= plan.budget_nbytes < plain(model, autocast).reserved


def test_a_budget_that_only_parking_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "current", Linked(FAST))
    model, budget = "dropout, tied weights", 10 << 20
    assert plain(model, False).reserved > budget
    with pytest.raises(InfeasibleError):
        train(model, budget, times=TIMES, recompute=False)
    found = train(model, budget, times=TIMES, offload="host", recompute=False, on_exceed="raise")
    assert found.same(plain(model, False)) and found.reserved <= budget and parked(found)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "cells"])
def test_a_slow_link_is_used_less(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ops may run again, too."""
    moved = []
    for rate in (FAST, SLOW):
        monkeypatch.setattr(times, "current", Linked(rate))
        found = train(model, "min", times=TIMES, offload="host")
        assert found.same(plain(model, False)) and not found.status.deviates
        assert 0 <= found.status.plan.predicted.peak_nbytes - found.allocated < BLOCK, "the host has the state of generators"
        moved.append(sum(parked(found).values()))
    assert moved[0] > moved[1]


def test_copies_run_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most copies may run while kernels do that were asked for later: no wait orders the two. Each way has a stream."""
    monkeypatch.setattr(times, "current", Linked(1e9))
    ops, last = log_of_a_step()
    train("dropout, tied weights", "min", times=TIMES, last=last, offload="host", recompute=False)
    kernels = [(i, op) for i, op in enumerate(ops) if op.what.startswith("aten::")]
    streams = set()
    for way in ("out", "in"):
        beside = [
            sum(i > ops.index(copy) and not copy.before(op) and not op.before(copy) for i, op in kernels)
            for copy in copies(ops, way)
        ]
        assert len(beside) > 10 and sum(n > 0 for n in beside) > len(beside) / 2
        streams.update(copy.stream for copy in copies(ops, way))
    assert len(streams) == 2


def run(code: str, **environment: str) -> tuple[list[str], str]:
    """The lines that another process prints, and what it says on stderr; no access there was unordered."""
    prelude = """
import torch
from tests.emulated import device
from tests.emulated.training import train
MODEL = "dropout, tied weights"
"""
    end = "\ntorch.cuda.synchronize()\nassert device.races() == 0"
    done = device.run([sys.executable, "-c", prelude + code + end], EMULATED_RACES="1", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_link_is_measured_and_not_used_where_it_is_slow() -> None:
    """One line says why nothing is parked."""
    code = """
found = train(MODEL, "min", times=2, offload="host", verbose=True)
link = found.status.rates.links["host"]
print(found.same(train(MODEL, None, times=2)), found.status.plan.parks)
print(int(link.out_bytes_per_second), int(link.in_bytes_per_second))
"""
    (same, rates), said = run(code, EMULATED_LINK=str(10_000_000))
    assert same == "True False"
    assert all(0 < int(rate) < 100_000_000 for rate in rates.split())
    (line,) = (line for line in said.splitlines() if "nothing is parked" in line)
    assert "no plan that parks was found to be faster than recomputation alone" in line


def test_a_host_that_locks_no_pages() -> None:
    """The bits are the same, a warning says what to do, and CUDA's error is nobody else's."""
    code = """
import torch
from lightning_memopt.runtime.tiers import streams
expected = train(MODEL, None, times=2)
for tier in ("host", "disk"):
    found = train(MODEL, "min", times=2, offload=tier, recompute=False, warned=".* could not be page-locked")
    print(found.same(expected), found.status.plan.parks, device.last_error())
streams._forget_error = lambda device: None
streams.HostPool(8 << 20, torch.device("cuda", 0)).close()
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    lines, said = run(code, EMULATED_PINNABLE=str(1 << 20))
    assert lines == ["True True 0", "True True 0", "CUDA error: out of memory"], "an error that is left is the next op's"
    assert "copies will hold up the host" in said and "see `ulimit -l`" in said


def test_another_device_than_the_current_one() -> None:
    """A model on device 1, in a process whose current device is 0: nothing is asked of device 0, not even a context."""
    code = """
import threading
from tests.emulated import training
torch.accelerator.current_stream = lambda device=None: torch.cuda.current_stream(1)  # Optimizer.step opens a context on 0
one = torch.device("cuda", 1)
side, forward = torch.cuda.Stream(one), training.Dropouts.forward
def and_frees_in_a_thread(self, tokens):
    held = [torch.ones(1 << 16, device=one)]
    held[0].record_stream(side)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    return forward(self, tokens)
training.Dropouts.forward = and_frees_in_a_thread
expected = train(MODEL, None, times=2, steps=10, device=one)
for options in ({"offload": "host", "recompute": False}, {"offload": "disk", "recompute": False}, {"pool": "planned"}):
    with device.logged() as ops:
        found = train(MODEL, "min", times=2, steps=10, device=one, **options)
    print(found.same(expected), found.status.phase, {op.device for op in ops}, [device.has_context(i) for i in range(3)])
    print(torch.cuda.current_device(), torch.cuda.max_memory_allocated(0))
print(found.status.pool.last.served > 0)
"""
    lines, _ = run(code, EMULATED_DEVICES="3")
    assert lines == ["True planned {1} [False, True, False]", "0 0"] * 3 + ["True"]
