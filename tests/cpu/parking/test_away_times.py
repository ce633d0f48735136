"""How long copies, codecs and waits for them take: measured, summed by the depot, shown beside what was predicted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.plan import Plan
from lightning_memopt.plan.model import Prediction
from lightning_memopt.report.table import parked_text
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.parked import Depot, ParkedTensor
from lightning_memopt.runtime.tiers import DiskTier, HostTier, Stopwatch
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.session import Transfers
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.fake_streams import Streams
from tests.cpu.lib.stepped import Masked, Stepped, held, stepped
from tests.cpu.lib.tier_bytes import Gate


class Ticks(threading.local):
    """A clock for each thread, one second further every time it is asked: what is timed takes one second."""

    now = 0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def masked() -> Iterator[Stepped]:
    with stepped(Masked()) as found:
        found.depot.waited, found.depot.coded = Stopwatch(Ticks()), Stopwatch(Ticks())
        found.depot.tiers["disk"].copied = Stopwatch(Ticks())  # type: ignore[misc]
        yield found


@pytest.mark.parametrize("form", ["disk", "bools", "bools@disk"])
@pytest.mark.parametrize("every", [0, 3])
def test_each_copy_wait_and_codec_is_timed_once(masked: Stepped, form: str, every: int) -> None:
    """What goes away is copied out and back, and waited for twice; a codec encodes it and decodes it."""
    program = masked.away(held(masked.graph, every) if every else None, form=form, least=1)
    depot, steps = masked.depot, 3
    for _ in range(steps):
        masked.step(program)
        masked.used_nbytes()  # the last copy has ended
    trips = 2 * steps * len(program.parked)
    assert depot.forwards == depot.timed == steps
    assert depot.copied_seconds == depot.waited.seconds == (trips if "disk" in form else 0)
    assert depot.coded.seconds == (trips if "bools" in form else 0)


def test_nothing_is_timed_where_nothing_moves(masked: Stepped) -> None:
    """A plan without trips asks no clock."""
    masked.step(Program(masked.graph, keep_all(masked.graph)))
    depot = masked.depot
    assert depot.forwards == 1
    for watch in (depot.waited, depot.coded, depot.tiers["disk"].copied):
        assert watch.seconds == 0 and watch._clock.now == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_wait_lasts_as_long_as_its_copy_is_not_done(tmp_path: Path, monkeypatch: Any, way: str) -> None:
    """The step's thread waits until the gate opens, 5 s later by its clock: that is the stall; the copy took 7 s by its own."""
    waits, now = threading.Event(), [0.0]

    def clock() -> float:
        waits.set()
        return now[0]

    copying = iter([0.0, 7.0])
    tier = DiskTier(1 << 16, tmp_path)
    depot = Depot({"disk": tier}, waited=Stopwatch(clock))
    name = "pwrite" if way == "out" else "preadv"
    if way == "out":
        gate = Gate(monkeypatch, name)
        tier.copied = Stopwatch(lambda: next(copying))
    away = ParkedTensor(depot, torch.ones(4096), "disk", "one")
    if way == "back":
        away.wait_copied()
        waits.clear()
        gate = Gate(monkeypatch, name)
        tier.copied = Stopwatch(lambda: next(copying))

    def later() -> None:
        assert waits.wait(20) and gate.reached.wait(20)
        now[0] += 5
        gate.open.set()

    thread = threading.Thread(target=later)
    thread.start()
    away.wait_copied() if way == "out" else away.value()
    thread.join()
    assert depot.waited.seconds == 5 and depot.copied_seconds == 7
    depot.close()


def test_a_failed_wait_is_timed_too(tmp_path: Path, monkeypatch: Any) -> None:
    tier = DiskTier(1 << 16, tmp_path)
    depot = Depot({"disk": tier}, waited=Stopwatch(Ticks()))
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    away = ParkedTensor(depot, torch.ones(64), "disk", "one")
    with pytest.raises(RuntimeError):
        away.wait_copied()
    assert depot.waited.seconds == 1
    depot.close()


class Device:
    """A stream, and events whose times are those at which it comes to them."""

    def __init__(self) -> None:
        self.milliseconds, self.made = 0.0, 0
        device = self

        class Event:
            def __init__(self) -> None:
                device.made += 1
                self.at: float | None = None
                self.waited = False

            def record(self, stream: Any) -> None:
                stream.append(self)

            def query(self) -> bool:
                return self.at is not None

            def synchronize(self) -> None:
                self.waited = True
                device.run(self.stream)

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        self.Event = Event
        Event.stream = self.stream = []  # type: ignore[attr-defined]

    def run(self, stream: list[Any]) -> None:
        for item in stream:
            if isinstance(item, float):
                self.milliseconds += item
            else:
                item.at = self.milliseconds
        stream.clear()


def test_a_device_is_timed_between_events_that_nobody_waits_for() -> None:
    """Seconds of what was queued, not of queueing it; pairs that are over are let go of."""
    device = Device()
    watch = Stopwatch(event=device.Event)
    for n in range(1000):
        with watch.running(device.stream):
            device.stream.append(3.0)
        device.stream.append(50.0)  # is not timed
        if n % 100 == 99:
            device.run(device.stream)
        assert len(watch._pairs) <= 165
    with watch.running(device.stream):
        device.stream.append(7.0)
    watch.on = False
    with watch.running(device.stream):
        device.stream.append(1000.0)
    watch.on = True
    with pytest.raises(ZeroDivisionError), watch.running(device.stream):
        device.Event.record = None  # type: ignore[method-assign, assignment]  # the device takes no more
        raise ZeroDivisionError
    assert device.made == 2003
    assert watch.seconds == pytest.approx(3.007) and watch.seconds == pytest.approx(3.007)
    assert not watch._pairs


def test_the_host_tier_times_its_copies_on_their_streams(monkeypatch: Any) -> None:
    """Between what precedes a copy on its stream and what follows it, whatever other streams do."""
    fake = Streams(0)
    monkeypatch.setattr(streams_module, "copy", fake.copy)
    tier = HostTier(1 << 16, "cpu", streams=fake)
    parked = tier.store(torch.ones(64, dtype=torch.uint8), "one")
    fake.drain()
    assert tier.copied.seconds == pytest.approx(2e-3), "the copy, and the mark behind it, of a millisecond each"
    parked.fetch(torch.empty(64, dtype=torch.uint8))
    fake.drain()
    assert tier.copied.seconds == pytest.approx(4e-3)
    tier.copied.on = False
    parked.fetch(torch.empty(64, dtype=torch.uint8))
    fake.drain()
    assert tier.copied.seconds == pytest.approx(4e-3)


def test_on_a_device_a_few_forwards_are_timed(tmp_path: Path) -> None:
    """Not the first ones, in which memory is allocated and rebuilds are verified, and not all of them."""
    depot = Depot({"disk": DiskTier(4096, tmp_path)})
    timed = []
    for _ in range(20):
        depot.begins("cuda")
        timed.append((depot.waited.on, depot.coded.on, depot.tiers["disk"].copied.on))
    assert timed == [(2 <= n < 10,) * 3 for n in range(20)]
    assert (depot.forwards, depot.timed) == (20, 8)
    depot.close()


# -- the table -------------------------------------------------------------------------------------------


def test_what_was_measured_stands_beside_what_was_predicted(masked: Stepped) -> None:
    lives = masked.away(form="bools@disk", least=1).lives
    predicted = Prediction(
        peak_nbytes=1, extra_seconds=0, extra_flops=0, rebuilt_nbytes=0, rebuilt_ops=0,
        moved_nbytes=4096, copy_seconds=0.2, stall_seconds=0.010, codec_seconds=0.001, tier_nbytes=2048,
    )  # fmt: skip
    plan = Plan(fingerprint="", lives=lives, solver="", budget_nbytes=1, predicted=predicted, unmodified_peak_nbytes=1)
    for transfers in (None, Transfers.of(Depot())):
        text = parked_text(plan, transfers)
        assert "stall not measured a step (predicted 10.0)" in text and "overlap not measured" in text
        assert "moved not measured a step, both ways (predicted 4.00 KiB)" in text
        assert "codecs not measured a step (predicted 1.0)" in text
    depot = masked.depot
    depot.forwards, depot.timed, depot.moved_nbytes = 10, 4, 10 * 5120
    for watch, seconds in ((depot.waited, 0.048), (depot.coded, 0.006), (depot.tiers["disk"].copied, 0.8)):
        watch._seconds = seconds
    text = parked_text(plan, Transfers.of(depot))
    assert "moved 5.00 KiB a step, both ways (predicted 4.00 KiB)" in text
    assert "stall 12.0 ms a step (predicted 10.0)" in text
    assert "overlap 94 % of the copies' time behind compute (predicted 95 %)" in text
    assert "codecs 1.5 ms a step (predicted 1.0)" in text
    depot.waited._seconds = 3.0  # threads that wait for each other: longer than the copies
    assert "overlap 0 %" in parked_text(plan, Transfers.of(depot))
