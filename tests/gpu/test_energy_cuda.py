"""Energy by the real NVML: of this device and no other, near its sampled power, and nothing where the device is a slice."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
from lightning_memopt.device.backends import backend_of
from lightning_memopt.telemetry import EnergyMeter, Meter, nvml_source
from lightning_memopt.telemetry.nvml import _handle
from lightning_memopt.telemetry.sources import EnergyCounter, PowerSampler

nvml: Any = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
CUDA = torch.device("cuda", 0)


def sliced() -> bool:
    """Whether this process has a slice of a board; as found, never changed."""
    nvml.nvmlInit()
    try:
        board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{backend_of(CUDA).uuid}")
        return bool(nvml.nvmlDeviceGetMigMode(board)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError_NotSupported:
        return False
    except nvml.NVMLError:
        return True
    finally:
        nvml.nvmlShutdown()


def work(seconds: float) -> Iterator[int]:
    a = torch.randn(4096, 4096, device=CUDA)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for _ in range(8):
            a = torch.tanh(a @ a)
        torch.cuda.synchronize(CUDA)
        yield 8


def test_p31_o2_a_slice_has_no_energy() -> None:
    if not sliced():
        pytest.skip("the device is a whole board")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        meter = Meter(CUDA, warmup=0)
        for samples in work(1.5):
            meter.step(samples)
        meter.stop()
    assert sum("no energy is reported" in str(w.message) for w in said) == 1 and not meter.total.energy


def test_the_board_is_the_device() -> None:
    """Found by UUID: on the same bus as CUDA's device, whatever NVML's number of it is."""
    if sliced():
        pytest.skip("the device is a slice (MIG)")
    nvml.nvmlInit()
    handle = _handle(nvml(CUDA))
    assert nvml.nvmlDeviceGetPciInfo(handle).bus == torch.cuda.get_device_properties(CUDA).pci_bus_id
    nvml.nvmlShutdown()


def test_the_counter_agrees_with_sampled_power() -> None:
    """Over three seconds of work: joules by the counter and by integrated power are within a fifth of each other."""
    if sliced():
        pytest.skip("the device is a slice (MIG)")
    source = nvml_source(CUDA)
    if not isinstance(source, EnergyCounter):
        pytest.skip("the device has no energy counter (before Volta)")
    nvml.nvmlInit()
    handle = _handle(nvml(CUDA))
    for _ in work(1.5):  # power is an average over up to a second: let it settle
        pass
    sampler = PowerSampler("the same", lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(handle))
    source.take()
    for _ in work(3.0):
        pass
    joules, integrated = source.take(), sampler.take()
    sampler.close()
    source.close()
    nvml.nvmlShutdown()
    assert joules and integrated and joules == pytest.approx(integrated, rel=0.2)


def test_o5_a_loop_on_the_device(monkeypatch: Any) -> None:
    """A meter's joules per sample come from whole seconds; the device is synchronised at the edges alone."""
    if sliced():
        pytest.skip("the device is a slice (MIG)")
    synchronised = []
    real = torch.cuda.synchronize
    meter = Meter(CUDA, warmup=0, every=10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: (synchronised.append(device), real(device)))
    batches = 0
    for samples in work(2.5):
        meter.step(samples)
        batches += 1
    meter.stop()
    rates = meter.rates()
    assert rates is not None and rates.joules_per_sample is not None and rates.peak_nbytes
    energy = meter.total.energy["device"]
    assert energy.seconds >= 1.0 and energy.watts is not None and 10 < energy.watts < 3000
    assert len(synchronised) == batches + batches // 10 + 1, "of the work, of the edges, of the end"


def test_no_energy_of_another_kind_of_device() -> None:
    with pytest.warns(UserWarning, match="not an NVIDIA GPU"):
        assert not EnergyMeter("cpu", lambda: [nvml_source(torch.device("cpu"))]).available
