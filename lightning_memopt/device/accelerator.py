"""Any accelerator, through `torch.accelerator`: XPU, and devices that register themselves with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_memopt.device.backend import Backend, Nbytes, Statistics
from lightning_memopt.errors import UnsupportedError


class Accelerator(Backend):
    """What all accelerators have in common. A budget counts requested bytes, because it is not known how their allocators round
    and split.

    Raises UnsupportedError for what torch does not implement for the device.
    """

    def check(self) -> None:
        self.statistics()

    def total_nbytes(self) -> int:
        return int(self._asked("get_memory_info")[1])

    def free_nbytes(self) -> int | None:
        return int(self._asked("get_memory_info")[0]) + int(self._asked("memory_reserved"))

    def statistics(self) -> Statistics:
        said = self._statistics()
        nbytes = _nbytes(said, "requested_bytes" if "requested_bytes.all.peak" in said else "allocated_bytes")
        return Statistics(*nbytes, (int(said.get("allocation.all.allocated", 0)), int(said.get("allocation.all.freed", 0))))

    def allocated(self) -> Nbytes:
        return _nbytes(self._statistics(), "allocated_bytes")

    def peak_nbytes(self) -> int:
        return self.statistics().peak_nbytes

    def reset_peaks(self) -> None:
        self._asked("reset_peak_memory_stats")

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    @property
    def streams(self) -> Any:
        module = super().streams
        if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
            raise UnsupportedError(f"the host tier needs streams, and torch has none for {self.device}. Use offload='disk'.")
        return module

    def _statistics(self) -> Mapping[str, Any]:
        statistics: Mapping[str, Any] = self._asked("memory_stats")
        if "allocated_bytes.all.peak" not in statistics:
            # Either the device was not used yet, or it keeps no statistics. In the second case this raises with the reason.
            self._asked("reset_peak_memory_stats")
            return dict.fromkeys((f"allocated_bytes.all.{when}" for when in ("current", "peak")), 0)
        return statistics

    def _asked(self, name: str) -> Any:
        ask: Callable[[torch.device], Any] | None = getattr(torch.accelerator, name, None)
        if ask is None:
            raise UnsupportedError(f"this torch has no torch.accelerator.{name}. Install a newer one, or use CUDA or a CPU.")
        try:
            return ask(self.device)
        except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
            raise UnsupportedError(
                f"a plan needs torch.accelerator.{name} for {self.device}, but torch says: {str(error).splitlines()[0]} "
                "Train on CUDA or a CPU, or set MEMOPT_DISABLE=1 to train without a plan."
            ) from error


def _nbytes(statistics: Mapping[str, Any], name: str) -> Nbytes:
    return Nbytes(*(int(statistics[f"{name}.all.{when}"]) for when in ("current", "peak")))
