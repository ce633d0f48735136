"""What the monitor logs of several ranks, and the meter of a plain loop within a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import distributed

from lightning_memopt import optimize
from lightning_memopt.callbacks.reduction import Reduction
from lightning_memopt.native import install
from lightning_memopt.telemetry import Energy, EnergyMeter, Tally, Throughput
from lightning_memopt.telemetry.sources import EnergyCounter
from tests.cpu.lib.fake_nvml import Clock
from tests.cpu.lib.loops import QUIET, batches, sgd, small, step, without_counter

WATTS = 100.0


def in_threads(world_size: int, rank: Callable[[int], None]) -> None:
    """`rank(number)` in every rank of a process group whose ranks are threads."""
    threaded = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")
    store, raised = distributed.HashStore(), []

    def worker(number: int) -> None:
        distributed.init_process_group("threaded", rank=number, world_size=world_size, store=store)
        try:
            rank(number)
        except BaseException as error:
            raised.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes those that wait for this rank
        finally:
            distributed.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=worker, args=(number,), daemon=True) for number in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not raised and not any(thread.is_alive() for thread in threads), raised


def test_ranks_are_reduced() -> None:
    """Four ranks on three devices, two of them on one: sums of samples, each device's joules once, the highest peak."""
    boards, joules = ["a", "b", "b", "c"], {"a": 300.0, "b": 500.0, "c": 100.0}
    found: dict[int, list[dict[str, float]]] = {}

    def rank(number: int) -> None:
        counter = EnergyCounter(boards[number], lambda: 0, 1e-3, (1 << 64,), 5e3)
        meters = {"device": EnergyMeter("fake", lambda: [counter])}
        reduction = Reduction(4, torch.device("cpu"), meters)
        used, samples = joules[boards[number]], 10 * (number + 1)
        lap = Tally(2, 1, samples, 2.0, {"device": Energy(used, used, 2.0, samples)})
        found[number] = [reduction(lap, 1000 + number), reduction(lap, None)]
        meters["device"].failed = number == 2
        found[number].append(reduction(lap, None))

    in_threads(4, rank)
    first, second, third = found[0]
    assert all(found[number] == found[0] for number in range(4)), "all ranks come to the same"
    assert first == pytest.approx(
        {
            "time": 2.0,
            "batches": 2.0,
            "samples": 25.0,
            "device/batches_per_sec": 1.0,
            "device/samples_per_sec": 12.5,
            "device/step_seconds": 2.0,
            "samples_per_sec": 50.0,
            "device/peak_memory_bytes": 1003.0,
            "device/energy_joules": 300.0,
            "energy_joules": 900.0,
            "device/power_watts": 150.0,
            "device/energy_joules_per_sample": 9.0,
        }
    )
    assert second["time"] == 4.0 and second["energy_joules"] == 1800.0 and "device/peak_memory_bytes" not in second
    assert third["samples_per_sec"] == 50.0 and not any("energy" in k or "watts" in k for k in third)


@pytest.mark.parametrize("native", [True, False], ids=["native", "profiled"])
def test_a_plain_loop(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.monitor()`: the report gains what was reached in planned steps, and joules; then the meter ends.

    Two steps are observed. The next one is measured: by the native counter at no cost, by the profiler it takes longer.
    """
    if not native:
        without_counter(monkeypatch)
    elif install() is None:
        pytest.skip("no compiler is here")
    slow = 2 if native else 3
    clock, data = Clock(), batches(12)
    counter = EnergyCounter("a", lambda: round(1e3 * WATTS * clock.now), 1e-3, (1 << 64,), 5e3, clock)
    energies = {"device": EnergyMeter("fake", lambda: [counter])}
    model = small()
    before = Throughput(device="cpu", steps=9, samples_per_step=24.0, samples_per_sec=12.0)
    optimizer = sgd(model)
    with optimize(model, optimizer, budget="min", **QUIET) as run:
        meter = run.monitor(warmup=0, clock=clock, energies=energies, before=before)
        for i, batch in enumerate(data):
            clock.after(50.0 if i < slow else 2.0)
            step(model, optimizer, batch)
            meter.step(samples=len(batch[0]))
            assert run.session.steady is (i >= slow)
    assert not energies["device"].available, "closed with the block"
    rates = meter.rates()
    assert rates is not None and (rates.steps, rates.samples_per_step, rates.samples_per_sec) == (12 - slow, 48.0, 24.0)
    assert rates.joules_per_sample == pytest.approx(WATTS * 2.0 / 48)
    report = run.report()
    assert "24; before 12, x2.000" in report and "48; before 24, x2.000" in report
    assert "4.167; before: not measured; the whole device" in report
