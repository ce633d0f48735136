"""The energy of a CUDA device by NVML: its counter, else its power, sampled. The whole board, whoever uses it.

NVML numbers devices as the PCI bus does and knows nothing of CUDA_VISIBLE_DEVICES: devices are found by their UUID. A slice of
a board (MIG) has neither energy nor power of its own. Needs the module `pynvml` of the package `nvidia-ml-py`.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from lightning_memopt.errors import EnergyUnavailableError
from lightning_memopt.telemetry.sources import Clock, Counter, PowerSampler, Source

_MILLI = 1e-3
_WRAPS = (1 << 32, 1 << 64)
"""Of the counter in mJ; old bindings give its lower 32 bits."""
_NO_ENERGY, _NO_POWER = (1 << 64) - 1, (1 << 32) - 1  # NVML_VALUE_NOT_AVAILABLE of each type
_MOST_WATTS = 5000.0  # boards of 2026 take up to 1,400


def uuid_of(device: torch.device) -> str:
    """Of a CUDA device, without the prefix that says what it is."""
    found = str(torch.cuda.get_device_properties(device).uuid)
    return found.removeprefix("GPU-").removeprefix("MIG-")


def nvml_source(device: torch.device, clock: Clock = time.perf_counter) -> Source:
    """Raises EnergyUnavailableError, which says why, where the device's energy cannot be had."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise EnergyUnavailableError(
            "it is no NVIDIA GPU; only the energy of those is read. Leave energy out, or use cpu=True for the processor's"
        )
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise EnergyUnavailableError(f"there is no NVML module ({error}); install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise EnergyUnavailableError(f"NVML does not begin ({error}); check NVIDIA's driver") from error
    try:
        return _source(nvml, uuid_of(device), clock)
    except BaseException:
        _end(nvml)
        raise


def _source(nvml: Any, uuid: str, clock: Clock) -> Source:
    handle = _handle(nvml, uuid)

    def energy() -> int:
        found = int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if found == _NO_ENERGY:
            raise EnergyUnavailableError("its energy counter has no value; check NVIDIA's driver")
        return found

    def power() -> float:
        found = int(nvml.nvmlDeviceGetPowerUsage(handle))
        if found == _NO_POWER:
            raise EnergyUnavailableError("its power has no value; check NVIDIA's driver")
        return _MILLI * found

    # AttributeError: a binding that is older than the function
    failures = (nvml.NVMLError, AttributeError, EnergyUnavailableError)
    key = f"GPU-{uuid}"
    try:
        return Counter(key, energy, _MILLI, _WRAPS, _MOST_WATTS, clock, lambda: _end(nvml))
    except failures as error:  # before Volta: no counter
        counter = error
    try:
        return PowerSampler(key, power, clock, finish=lambda: _end(nvml))
    except failures as error:
        raise EnergyUnavailableError(
            f"NVML gives neither its energy ({counter}) nor its power ({error}); check NVIDIA's driver"
        ) from error


def _handle(nvml: Any, uuid: str) -> Any:
    """Of the device with this UUID, whatever its number. Raises where it is a slice, or has slices."""
    sliced = EnergyUnavailableError(
        "it is a slice of a board (MIG), of which NVML measures neither energy nor power; measure on a whole one"
    )
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        try:
            nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        except nvml.NVMLError:
            raise EnergyUnavailableError(f"NVML knows no device GPU-{uuid} ({error}); check NVIDIA's driver") from error
        raise sliced from None
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError, AttributeError):
        return handle  # it cannot be sliced
    if current == nvml.NVML_DEVICE_MIG_ENABLE:
        raise sliced
    return handle


def _end(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        pass  # it was over before
