"""Several devices in one process: a model on another device than the current one, and a model on two devices."""

from __future__ import annotations

import pytest

from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")


def test_another_device_than_the_current_one() -> None:
    """A model on device 1, in a process whose current device is 0: nothing is asked of device 0, not even a context."""
    code = """
import threading, torch
from tests.emulated import device, training
from tests.emulated.training import train
MODEL = "dropout, tied weights"
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
    lines, _ = device.lines_of(code, EMULATED_DEVICES="3")
    assert lines == ["True planned {1} [False, True, False]", "0 0"] * 3 + ["True"]


def test_a_model_on_two_devices() -> None:
    """The budget is for the device of its first parameter. Copies between the two are ops of the plan."""
    code = """
import torch
from lightning_memopt.session import times
from tests.cpu.lib.times import Linked
from tests.emulated import device, training
from tests.emulated.training import train
times.current = Linked(1e11)
training.MODELS["halves"] = training.Halves, lambda n, device: torch.randn(1024, 64, device=device)
for index in (0, 1):
    first = torch.device("cuda", index)
    expected = train("halves", None, device=first)
    for tier in ("host", "disk"):
        found = train("halves", "min", device=first, offload=tier, recompute=False)
        status, peak = found.status, found.status.plan.predicted.peak_nbytes
        print(found.same(expected), status.deviates, status.plan.parks, found.allocated == peak < expected.allocated)
"""
    lines, _ = device.lines_of(code, EMULATED_DEVICES="2")
    assert lines == ["True False True True"] * 4


def test_a_model_on_two_devices_says_that_one_is_planned() -> None:
    """And takes on the other one what a plain step takes."""
    code = """
import contextlib, torch
from tests.emulated import training
from tests.emulated.training import train
training.MODELS["halves"] = training.Halves, lambda n, device: torch.randn(1024, 64, device=device)
@contextlib.contextmanager
def last():
    torch.cuda.reset_peak_memory_stats(0)
    yield
    beside.append(torch.cuda.memory_stats(0)["requested_bytes.all.peak"])
beside = []
plain = train("halves", None, device=torch.device("cuda", 1), last=last)
found = train("halves", "min", device=torch.device("cuda", 1), last=last, verbose=True)
status = found.status
assert status.phase == "planned" and not status.deviates, status
assert found.same(plain)
assert beside[0] == beside[1], "nothing is planned there"
assert found.requested < plain.requested
assert abs(found.requested - status.plan.predicted_peak_nbytes) <= 64 << 10, (found.requested, status.plan)
"""
    _, said = device.lines_of(code, EMULATED_DEVICES="2")
    assert "parameters are on cuda:0 as well. The budget is that of cuda:1" in said
