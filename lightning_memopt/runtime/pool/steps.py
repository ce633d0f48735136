"""What was logged of a step's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_memopt.units import round_up

ALIGNMENT = 64
"""Bytes: torch's own alignment on the CPU. With another one, kernels could take another path, and give other bits."""


class Request(NamedTuple):
    """A request of a step that can be planned.

    number: its number in the step, which is the time at which its buffer comes.
    until: the number of the request that comes after its end. Numbers above the step's are those of the next step.
    nbytes: what was asked for.
    """

    number: int
    until: int
    nbytes: int


@dataclass(frozen=True)
class LoggedStep:
    """The requests of one step, and when they were freed, in this step or the next one.

    nbytes: of every request, in their order.
    requests: those that can be planned. The others were not freed by the end of the next step (optimizer state that the step
        made, outputs that the user keeps), or live longer than a step.
    beside_nbytes: the most bytes of the process that were live at one moment besides the requests that can be planned.
    crossing_nbytes: bytes of those that can be planned and were live when the step ended. In an arena's first step they are
        beside it.
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
        """The step that the first `count` requests of a log are.

        log: bytes of each request, and the number of the request after its end; None: it was not freed. A request was freed in
            the next step only where the log has that step, too.
        live_nbytes: all live bytes of the process when the step ended.
        at_end: the log as it was then.
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
        """How many requests the step has. The next step begins so much later."""
        return len(self.nbytes)

    @property
    def rounding_nbytes(self) -> int:
        """How much higher max-live is because sizes are rounded up to `ALIGNMENT`."""
        rounded = [request._replace(nbytes=round_up(request.nbytes, ALIGNMENT)) for request in self.requests]
        return max_live_nbytes(rounded, self.period) - max_live_nbytes(self.requests, self.period)


def max_live_nbytes(requests: Sequence[Request], period: int) -> int:
    """The most bytes of these requests that are live at one moment, where each step has the same ones `period` later."""
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
