"""The energy of a CUDA device by NVML: from its energy counter, or else from power samples.

It is the energy of the whole board, including other programs that run on it. NVML numbers devices by their PCI bus and ignores
CUDA_VISIBLE_DEVICES, so devices are found by their UUID. NVML measures neither energy nor power of a slice of a board (MIG).
Needs the module `pynvml` of the package `nvidia-ml-py`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import EnergyUnavailableError
from lightning_memopt.telemetry.sources import Clock, EnergyCounter, EnergySource, PowerSampler

_MILLI = 1e-3
_WRAPS = (1 << 32, 1 << 64)
"""Values, in mJ, at which the counter begins again at 0: it has 64 bits, of which old bindings give the lower 32."""
_NO_ENERGY, _NO_POWER = (1 << 64) - 1, (1 << 32) - 1  # NVML_VALUE_NOT_AVAILABLE of each type
_MOST_WATTS = 5000.0
"""More watts than any board takes; boards of 2026 take up to 1,400 W."""


def nvml_source(device: torch.device, clock: Clock = perf_counter) -> EnergySource:
    """The energy source of a CUDA device. Raises EnergyUnavailableError, which says why, if it cannot be read."""
    uuid = backend_of(device).uuid
    if uuid is None:
        raise EnergyUnavailableError(
            "it is not an NVIDIA GPU, and only their energy can be read. Leave energy out, or use cpu=True for the processors"
        )
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise EnergyUnavailableError(f"there is no NVML module ({error}); install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise EnergyUnavailableError(f"NVML cannot be started ({error}); check NVIDIA's driver") from error
    try:
        return _source(nvml, uuid, clock)
    except BaseException:
        _end(nvml)
        raise


def _source(nvml: Any, uuid: str, clock: Clock) -> EnergySource:
    handle = _handle(nvml, uuid)

    def energy() -> int:
        millijoules = int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if millijoules == _NO_ENERGY:
            raise EnergyUnavailableError("its energy counter has no value; check NVIDIA's driver")
        return millijoules

    def power() -> float:
        milliwatts = int(nvml.nvmlDeviceGetPowerUsage(handle))
        if milliwatts == _NO_POWER:
            raise EnergyUnavailableError("its power has no value; check NVIDIA's driver")
        return _MILLI * milliwatts

    # AttributeError: the installed binding is older than the function
    failures = (nvml.NVMLError, AttributeError, EnergyUnavailableError)
    key = f"GPU-{uuid}"
    try:
        return EnergyCounter(key, energy, _MILLI, _WRAPS, _MOST_WATTS, clock, lambda: _end(nvml))
    except failures as error:  # boards before Volta have no counter
        counter_error = error
    try:
        return PowerSampler(key, power, clock, finish=lambda: _end(nvml))
    except failures as error:
        raise EnergyUnavailableError(
            f"NVML gives neither its energy ({counter_error}) nor its power ({error}); check NVIDIA's driver"
        ) from error


def _handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the device with this UUID. Raises EnergyUnavailableError if it is a slice, or has slices."""
    sliced = EnergyUnavailableError(
        "it is a slice of a board (MIG), for which NVML measures neither energy nor power; measure on a whole board"
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
        return handle  # this board cannot have slices
    if current == nvml.NVML_DEVICE_MIG_ENABLE:
        raise sliced
    return handle


def _end(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        pass  # NVML was shut down before
