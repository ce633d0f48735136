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

import torch

from lightning_memopt.torch_private import C, allocator_history, allocator_snapshot

_MOST = 1 << 20
"""Entries of the record. Where a step has more, nothing is known of its ops."""

Counts = tuple[int, int]
"""Allocations, frees."""


class Requests:
    """The record of one observed step. `close` ends it.

    records: there is one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        others = getattr(C, "_cuda_isHistoryEnabled", None)  # only in builds for CUDA
        self.records = others is not None and torch.cuda.get_allocator_backend() == "native" and not others()
        self._spans: list[tuple[Counts, Counts]] = []
        if self.records:
            allocator_history("all", context=None, max_entries=_MOST)

    def begin(self, index: int, counts: Counts) -> None:
        """An op is about to run. Replaces that of an op that raised."""
        self._spans[index:] = [(counts, counts)]

    def end(self, counts: Counts) -> None:
        """It has run."""
        self._spans[-1] = self._spans[-1][0], counts

    def of_ops(self, counts: Counts) -> dict[int, tuple[int, ...]]:
        """Op -> what it asked for, as `Graph.asked`; empty where that is not known. `counts`: now."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        traces = allocator_snapshot()["device_traces"]
        trace = [e for e in traces[index] if e["action"] in ("alloc", "free_requested")] if index < len(traces) else []
        return dict(_of_ops(trace, self._spans, counts))

    def close(self) -> None:
        """Stop recording."""
        if self.records:
            self.records = False
            allocator_history(None)


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
