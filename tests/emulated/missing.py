"""Leave out one of the waits of the host tier, as a fault in it would."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from typing import Any

import torch

WAITS = (
    "__init__: tier.out.wait_event(produced)  # T1",
    "wait_stored: self._current().wait_event(self.done)",
    "fetch: tier.back.wait_event(self.done)  # T3",
    "fetch: tier.back.wait_event(free)  # T3",
    "wait_fetched: self._current().wait_event(self.fetched)",
    "_reclaim: self.out.wait_event(parked.fetched)",
)
"""The function and the line of each (runtime/tiers/host.py)."""


@contextlib.contextmanager
def missing(which: str) -> Iterator[list[str]]:
    """Within, streams do not wait where this line says it. Gives a list with an entry for each time."""
    times: list[str] = []
    wait = torch.cuda.Stream.wait_event

    def wait_event(stream: Any, event: Any) -> None:
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
        if f"{caller.f_code.co_name}: {line}" == which:
            times.append(line)
        else:
            wait(stream, event)

    torch.cuda.Stream.wait_event = wait_event  # type: ignore[method-assign]
    try:
        yield times
    finally:
        torch.cuda.Stream.wait_event = wait  # type: ignore[method-assign]
