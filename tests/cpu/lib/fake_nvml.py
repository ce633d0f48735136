"""NVML as its Python module shows it, and a clock that only tests move. Names, codes and classes are nvidia-ml-py's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

CODES = {
    "Uninitialized": 1,
    "NotSupported": 3,
    "NoPermission": 4,
    "NotFound": 6,
    "DriverNotLoaded": 9,
    "LibraryNotFound": 12,
    "GpuIsLost": 15,
    "Unknown": 999,
}


class Clock:
    """Seconds; `after(n)` moves them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Board:
    """`watts` drawn since `clock` began, on top of `counted` mJ; `raises` the error of a function by the function's name."""

    uuid: str
    clock: Clock
    watts: float = 100.0
    counted: int = 0
    modulus: int = 1 << 64
    sliced: bool | None = None
    raises: dict[str, str] = field(default_factory=dict)


class FakeNvml(types.ModuleType):
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, boards: Iterable[Board] = (), slices: Iterable[str] = (), begins: str = "") -> None:
        super().__init__("pynvml")
        self.boards, self.slices, self.begins = list(boards), list(slices), begins
        self.open = 0

        class NVMLError(Exception):
            def __init__(self, value: int = 999) -> None:
                super().__init__(f"NVML error {value}")
                self.value = value

        self.NVMLError = NVMLError
        for name, value in CODES.items():
            setattr(self, f"NVMLError_{name}", type(f"NVMLError_{name}", (NVMLError,), {"code": value}))

    def _raise(self, name: str) -> None:
        kind = getattr(self, f"NVMLError_{name}")
        raise kind(kind.code)

    def _of(self, handle: Board, function: str) -> Board:
        if not self.open:
            self._raise("Uninitialized")
        if function in handle.raises:
            self._raise(handle.raises[function])
        return handle

    def nvmlInit(self) -> None:
        if self.begins:
            self._raise(self.begins)
        self.open += 1

    def nvmlShutdown(self) -> None:
        if not self.open:
            self._raise("Uninitialized")
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for board in self.boards:
            if uuid == f"GPU-{board.uuid}":
                return board
        if uuid in self.slices:
            return uuid
        return self._raise("NotFound")

    def nvmlDeviceGetMigMode(self, handle: Board) -> list[int]:
        if self._of(handle, "mig").sliced is None:
            self._raise("NotSupported")
        return [int(bool(handle.sliced)), int(bool(handle.sliced))]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Board) -> int:
        board = self._of(handle, "energy")
        return (board.counted + int(1e3 * board.watts * board.clock.now)) % board.modulus

    def nvmlDeviceGetPowerUsage(self, handle: Board) -> int:
        return int(1e3 * self._of(handle, "power").watts)


def install(monkeypatch: Any, module: Any, uuids: Iterable[str] = ("a",)) -> Callable[[int], torch.device]:
    """Make `module` what `import pynvml` gives (None: there is none), and `uuids` those of CUDA's devices, in this order."""
    found = [types.SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[torch.device(device).index])
    return lambda index: torch.device("cuda", index)
