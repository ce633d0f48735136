"""Find what each op of an observed step requests from CUDA's caching allocator, in order, from torch's own record of requests.

The workspace of an op comes in several blocks, of both pools, between those of its results. Which free blocks the allocator
splits, and so what it reserves, depends on all of them. The allocator's statistics count allocations and frees. Read before and
after an op, they show which entries of the record belong to the op. While the user keeps such a record, this one is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_memopt.device.backend import Backend

_MOST = 1 << 20
"""Maximum number of entries of the record. If a step has more, the requests of its ops stay unknown."""

Counts = tuple[int, int]
"""(number of allocations, number of frees)."""


class Requests:
    """The record of one observed step. `close` ends it.

    records: whether a record is kept.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.records = backend.record_requests(_MOST)
        self._spans: list[tuple[Counts, Counts]] = []

    def begin(self, index: int, counts: Counts) -> None:
        """An op is about to run. Replaces the entry of an op that raised an error."""
        self._spans[index:] = [(counts, counts)]

    def end(self, counts: Counts) -> None:
        """The op has run."""
        self._spans[-1] = self._spans[-1][0], counts

    def of_ops(self, counts: Counts) -> dict[int, tuple[int, ...]]:
        """Op -> its requests, as in `Graph.asked`; empty if they are not known. `counts`: the present counts."""
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
    """Counts of allocations and frees are indices into the record, whose last entry belongs to the counts `now`."""
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
