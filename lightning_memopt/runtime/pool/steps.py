"""The log of a step's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_memopt.units import round_up

ALIGNMENT = 64
"""Bytes. It is torch's own alignment on the CPU: with another one, kernels could take another path and give other bits."""


class Request(NamedTuple):
    """A request of a step that can be planned.

    number: its number in the step, which is also the time at which its buffer is allocated.
    until: the number of the first request after it was freed. Numbers above the step's are those of the next step.
    nbytes: the bytes that were requested.
    """

    number: int
    until: int
    nbytes: int


@dataclass(frozen=True)
class LoggedStep:
    """The requests of one step, and when they were freed, in this step or the next one.

    nbytes: bytes of every request, in order.
    requests: the requests that can be planned. The others were not freed by the end of the next step (optimizer state that
        the step made, outputs that the user keeps), or live longer than a step.
    beside_nbytes: maximum bytes of the process that were live at one moment, without the requests that can be planned.
    crossing_nbytes: bytes of requests that can be planned and were live when the step ended. In an arena's first step they
        are outside of the arena.
    """

    nbytes: tuple[int, ...]
    requests: tuple[Request, ...]
    beside_nbytes: int
    crossing_nbytes: int = 0

    @classmethod
    def of(
        cls,
        log: Sequence[tuple[int, int | None]],
        count: int,
        live_nbytes: int,
        at_end: Sequence[tuple[int, int | None]],
    ) -> LoggedStep:
        """The step made of the first `count` requests of a log.

        log: (bytes of a request, number of the first request after it was freed, or None if it was not freed). Requests that
            were freed in the next step are known only if the log has that step, too.
        live_nbytes: all live bytes of the process when the step ended.
        at_end: the log at that time.
        """
        requests = []
        for number, (nbytes, until) in enumerate(log[:count]):
            if until is not None and until <= number + count:
                requests.append(Request(number, until, nbytes))
        planned = {request.number for request in requests}
        crossing = sum(nbytes for number, (nbytes, until) in enumerate(at_end[:count]) if number in planned and until is None)
        others = [
            Request(number, count if until is None else min(until, count), nbytes)
            for number, (nbytes, until) in enumerate(log[:count])
            if number not in planned
        ]
        beside = max_live_nbytes(others, count)
        return cls(tuple(nbytes for nbytes, _ in log[:count]), tuple(requests), live_nbytes - crossing + beside, crossing)

    @property
    def period(self) -> int:
        """Number of requests of the step, which is the time from one step to the next."""
        return len(self.nbytes)

    @property
    def rounding_nbytes(self) -> int:
        """Bytes that rounding sizes up to `ALIGNMENT` adds to max-live."""
        rounded = [request._replace(nbytes=round_up(request.nbytes, ALIGNMENT)) for request in self.requests]
        return max_live_nbytes(rounded, self.period) - max_live_nbytes(self.requests, self.period)


def max_live_nbytes(requests: Sequence[Request], period: int) -> int:
    """Maximum bytes of these requests that are live at one moment, if the step is repeated every `period`."""
    change = [0] * (period + 1)
    for request in requests:
        change[request.number] += request.nbytes
        change[min(request.until, period)] -= request.nbytes
        if request.until > period:
            change[0] += request.nbytes
            change[request.until - period] -= request.nbytes
    live = most = 0
    for nbytes in change:
        live += nbytes
        most = max(most, live)
    return most
