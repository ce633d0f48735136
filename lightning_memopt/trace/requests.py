"""What each op of an observed step asks of CUDA's caching allocator, in order: torch's own record of the allocator says it.

Bytes that an op takes for itself (workspace) come in several blocks, of both pools, between those of its results. Which free
blocks the allocator splits, and so what it reserves, depends on all of them. Its statistics count allocations and frees; read
before and after an op, they say which entries of the record are the op's. While the user keeps a record of their own, there is
none of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_memopt.device.backend import Backend

_MOST = 1 << 20
"""Entries of the record. Where a step has more, nothing is known of its ops."""

Counts = tuple[int, int]
"""Allocations, frees."""


class Requests:
    """The record of one observed step. `close` ends it.

    records: there is one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.records = backend.record_requests(_MOST)
        self._spans: list[tuple[Counts, Counts]] = []

    def begin(self, index: int, counts: Counts) -> None:
        """An op is about to run. Replaces that of an op that raised."""
        self._spans[index:] = [(counts, counts)]

    def end(self, counts: Counts) -> None:
        """It has run."""
        self._spans[-1] = self._spans[-1][0], counts

    def of_ops(self, counts: Counts) -> dict[int, tuple[int, ...]]:
        """Op -> what it asked for, as `Graph.asked`; empty where that is not known. `counts`: now."""
        trace = [e for e in self._backend.recorded_requests() if e["action"] in ("alloc", "free_requested")]
        return dict(_of_ops(trace, self._spans, counts))

    def close(self) -> None:
        """Stop recording."""
        if self.records:
            self.records = False
            self._backend.stop_recording()


def _of_ops(
    trace: Sequence[Mapping[str, Any]], spans: Sequence[tuple[Counts, Counts]], now: Counts
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The record ends where the statistics stand `now`, so entries have their places from its end on."""
    began = sum(now) - len(trace)
    wanted = [sum(counts) - began for span in spans for counts in span]
    if not wanted or wanted[0] < 0 or any(a > b for a, b in pairwise(wanted)):
        return
    for op, (first, last) in enumerate(zip(wanted[::2], wanted[1::2], strict=True)):
        asked: list[int] = []
        numbers: dict[int, int] = {}
        count = 0
        for entry in trace[first:last]:
            if entry["action"] == "alloc":
                asked.append(entry["size"])
                count += 1
                numbers[entry["addr"]] = count
            elif (number := numbers.pop(entry["addr"], 0)) > 0:
                asked.append(-number)
        if any(n > 0 for n in asked):
            yield op, tuple(asked)
