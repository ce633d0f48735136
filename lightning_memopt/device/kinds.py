"""What a plan has to know about a type of device. Input: the name that torch uses for it. Works without torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.units import round_up

_CUDA_BLOCK_NBYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A type of device.

    Args:
        name: "cpu", "cuda", "xpu", and so on.
        is_host: ops run in the thread that calls them, and the memory is the host's.
        block_nbytes: the allocator rounds up to multiples of this.
        has_segments: the allocator takes segments from the device and keeps them. `plan.allocator` models it, and a budget
            counts segments. For other devices, a budget counts the bytes of tensors.
    """

    name: str
    is_host: bool = False
    block_nbytes: int = 1
    has_segments: bool = False

    def allocated_nbytes(self, nbytes: int) -> int:
        """The bytes of the block that the allocator gives for a request."""
        return nbytes if self.block_nbytes == 1 else round_up(nbytes, self.block_nbytes)

    @property
    def slow_tier(self) -> str:
        """The fastest offload tier that is not the device's own memory."""
        return "disk" if self.is_host else "host"


CPU = DeviceKind("cpu", is_host=True)
CUDA = DeviceKind("cuda", block_nbytes=_CUDA_BLOCK_NBYTES, has_segments=True)
_KINDS = {kind.name: kind for kind in (CPU, CUDA)}


def kind_of(name: str) -> DeviceKind:
    """The kind of the devices whose type has this name."""
    return _KINDS.get(name) or DeviceKind(name)
