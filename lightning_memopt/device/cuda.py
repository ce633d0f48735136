"""CUDA devices, and ROCm devices, which torch calls by the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_memopt.device.backend import Backend, Nbytes, Statistics
from lightning_memopt.device.places import indexed
from lightning_memopt.device.segments import in_order
from lightning_memopt.torch_private import C, allocator_history, allocator_snapshot


class Cuda(Backend):
    """A CUDA device, with torch's caching allocator."""

    keeps_workspaces = True
    locks_pages = True
    runs_triton = True

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.device))

    @property
    def uuid(self) -> str | None:
        if torch.version.hip is not None:
            return None
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return uuid.removeprefix("GPU-").removeprefix("MIG-")

    def total_nbytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def free_nbytes(self) -> int | None:
        """As the CUDA runtime says, which knows it for slices of a GPU as well."""
        return int(torch.cuda.mem_get_info(self.device)[0]) + int(torch.cuda.memory_reserved(self.device))

    @property
    def shares_memory(self) -> bool:
        return bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))

    def statistics(self) -> Statistics:
        said = torch.cuda.memory_stats_as_nested_dict(self.device)
        nbytes = said.get("requested_bytes") or said["allocated_bytes"]  # other allocators do not count requested bytes
        counts = said["allocation"]["all"]
        turnover = int(counts["allocated"]), int(counts["freed"])
        return Statistics(int(nbytes["all"]["current"]), int(nbytes["all"]["peak"]), turnover)

    def allocated(self) -> Nbytes:
        return Nbytes(int(torch.cuda.memory_allocated(self.device)), int(torch.cuda.max_memory_allocated(self.device)))

    def peak_nbytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def allocator_settings(self) -> Mapping[str, Any] | None:
        if not self._is_native():
            return None
        settings: Mapping[str, Any] = allocator_snapshot().get("allocator_settings", {})
        return settings

    def segments(self) -> list[Mapping[str, Any]] | None:
        if not self._is_native():
            return None
        index = indexed(self.device).index
        own = [segment for segment in allocator_snapshot()["segments"] if segment["device"] == index]
        ordered = in_order(own, index, self.current_stream().cuda_stream)
        self.reset_peaks()  # the requests made above have raised them
        return ordered

    def record_requests(self, most: int) -> bool:
        others = getattr(C, "_cuda_isHistoryEnabled", None)  # exists only in builds for CUDA
        if others is None or not self._is_native() or others():
            return False
        allocator_history("all", context=None, max_entries=most)
        return True

    def recorded_requests(self) -> Sequence[Mapping[str, Any]]:
        traces = allocator_snapshot()["device_traces"]
        index = indexed(self.device).index
        return traces[index] if index < len(traces) else ()

    def stop_recording(self) -> None:
        allocator_history(None)

    def _is_native(self) -> bool:
        return bool(torch.cuda.get_allocator_backend() == "native")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def lock_pages(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 3))  # 1: in every context; 2: kernels may read it

    def unlock_pages(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))
