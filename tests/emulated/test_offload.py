"""Planned steps that park tensors on the host: which plans park, bits, bytes, the order of copies and kernels, links, and a
host that locks no pages.

Links have given rates where plans are compared, and are slow in real time where rates are measured (`EMULATED_LINK`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.native import engine
from lightning_memopt.session.parked_states import StatesAtRest
from lightning_memopt.session.parked_weights import WeightsAtRest
from lightning_memopt.units import format_nbytes, round_up
from tests.cpu.lib.times import Linked, given
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
"""Factor by which batches are larger, so that a plan that parks takes fewer segments than the plain step."""
_plain: dict[tuple[str, bool], Trained] = {}


@pytest.fixture(autouse=True)
def what_rests_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are about saved tensors (the others: test_states.py, test_gradients.py, test_weights.py)."""
    monkeypatch.setattr(StatesAtRest, "found", lambda *_, **__: [])
    monkeypatch.setattr(WeightsAtRest, "found", lambda *_, **__: [])


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
    given(monkeypatch, Linked(rate))
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
    given(monkeypatch, Linked(FAST))
    model, budget = "dropout, tied weights", 10 << 20
    assert plain(model, False).reserved > budget
    with pytest.raises(InfeasibleError):
        train(model, budget, times=TIMES, recompute=False)
    found = train(model, budget, times=TIMES, offload="host", recompute=False, on_exceed="raise")
    assert found.same(plain(model, False)) and found.reserved <= budget and parked(found)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "cells"])
def test_a_slow_link_is_not_used(model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where ops may run again; one line says so."""
    caplog.set_level(logging.INFO, logger="lightning_memopt")
    moved, said = [], []
    for rate in (FAST, SLOW):
        caplog.clear()
        given(monkeypatch, Linked(rate))
        found = train(model, "min", times=TIMES, offload="host", verbose=True)
        assert found.same(plain(model, False)) and not found.status.deviates
        assert 0 <= found.status.plan.predicted.peak_nbytes - found.allocated < BLOCK, "the host has the state of generators"
        moved.append(sum(parked(found).values()))
        assert f"unmodified {format_nbytes(plain(model, False).reserved)};" in caplog.text, "as a budget counts it"
        said.append("no saved tensor is parked in the host tier" in caplog.text)
    assert moved[0] > moved[1] == 0
    assert said == [False, True]


def test_copies_run_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most copies may run while kernels do that were asked for later: no wait orders the two. Each way has a stream."""
    given(monkeypatch, Linked(1e9))
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


def test_a_link_that_is_slow_in_real_time() -> None:
    """It is measured as it is, and used where nothing else is left."""
    code = """
from tests.emulated.training import train
MODEL = "dropout, tied weights"
found = train(MODEL, "min", times=2, offload="host", recompute=False)
link = found.status.rates.links["host"]
print(found.same(train(MODEL, None, times=2)), found.status.plan.parks)
print(int(link.out_bytes_per_second), int(link.in_bytes_per_second))
"""
    (trained, rates), _ = device.lines_of(code, EMULATED_LINK=str(30_000_000))
    assert trained == "True True"
    assert all(0 < int(rate) < 300_000_000 for rate in rates.split())


def test_a_host_that_locks_no_pages() -> None:
    """The bits are the same, a warning says what to do, and CUDA's error is nobody else's."""
    code = """
import torch
from lightning_memopt.runtime.tiers import streams
from tests.emulated import device
from tests.emulated.training import train
MODEL = "dropout, tied weights"
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
    lines, said = device.lines_of(code, EMULATED_PINNABLE=str(1 << 20))
    assert lines == ["True True 0", "True True 0", "CUDA error: out of memory"], "an error that is left is the next op's"
    assert "copies will hold up the host" in said and "see `ulimit -l`" in said
