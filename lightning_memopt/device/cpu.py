"""The host. Its allocator keeps no statistics; `native.counter_of` counts instead."""

from __future__ import annotations

from lightning_memopt.clocks import thread_time
from lightning_memopt.device.backend import Backend
from lightning_memopt.units import host_memory_nbytes


class Cpu(Backend):
    """The memory that this process may use, within its cgroup limit. Each thread is timed by its own CPU clock, because other
    threads may be busy.
    """

    keeps_statistics = False

    def total_nbytes(self) -> int:
        return host_memory_nbytes()

    def clock(self) -> float:
        return thread_time()
