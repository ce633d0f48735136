"""The windows of a CUDA device: each stream has its own, with its own log, addresses and arena.

A stream becomes known at its first request while a window of the device is open. It is logged from the next step on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning_memopt.logs import Say
from lightning_memopt.native import CudaAllocator, StreamPool
from lightning_memopt.plan import Addresses
from lightning_memopt.runtime.pool.windows import Counts, Decided, PoolStatus, PoolWindows, Solve


class StreamWindows:
    """The windows of one run on a device, with the methods of `PoolWindows`.

    main: the pool of the stream in which steps begin.
    solver: makes the function that solves addresses; it is given the function for messages.
    decided: is told of the addresses of the main stream. Only these are a part of the plan.
    """

    def __init__(
        self,
        allocator: CudaAllocator,
        device: int,
        main: StreamPool,
        solver: Callable[[Say], Solve],
        say: Say,
        decided: Decided = lambda key, addresses: None,
    ) -> None:
        self._allocator, self._device, self._solver, self._say = allocator, device, solver, say
        self._main = main.number
        self._windows = {main.number: PoolWindows(main, solver(say), say, decided)}
        self._closed = False

    def begins(self, key: object, budget_nbytes: int, planned: Addresses | None = None) -> None:
        """A step of a signature begins, on all streams."""
        if self._closed:
            return
        for pool in self._allocator.streams(self._device):
            if pool.active and pool.number not in self._windows:
                say = partial(_said, self._say, pool.number)
                self._windows[pool.number] = PoolWindows(pool, self._solver(say), say)
        for number, windows in self._windows.items():
            windows.begins(key, budget_nbytes, planned if number == self._main else None)

    def rests(self) -> None:
        """Until the next step begins, the ordinary allocator serves all requests."""
        for windows in self._windows.values():
            windows.rests()

    def close(self) -> None:
        """The run is over. May be called again."""
        if self._closed:
            return
        self._closed = True
        for windows in self._windows.values():
            windows.close()
        for pool in self._allocator.streams(self._device):
            pool.forget()

    def status(self) -> PoolStatus:
        """The status: steps and the reason of the main stream, requests of all streams."""
        return together([windows.status() for windows in self._windows.values()])


def _said(say: Say, stream: int, text: str) -> None:
    say(text.replace("MemOpt: ", f"MemOpt: CUDA stream {stream}: ", 1))


def together(each: Sequence[PoolStatus]) -> PoolStatus:
    """The status of several streams, the first of which is the main one. `addresses`: those with the largest arena."""
    main = each[0]
    known = [status.addresses for status in each if status.addresses is not None]
    return PoolStatus(
        reason=main.reason,
        addresses=max(known, key=lambda addresses: addresses.arena_nbytes, default=None),
        steps=main.steps,
        deviating=main.deviating,
        reserved_nbytes=max(status.reserved_nbytes for status in each),
        last=sum((status.last for status in each), Counts()),
        total=sum((status.total for status in each), Counts()),
    )
