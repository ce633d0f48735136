"""Compare a recorded trace of the real allocator with the model: the model gets the same requests, and reserved bytes are
compared after each.

In: the entries of one device of `torch.cuda.memory._snapshot()["device_traces"]`, recorded (`_record_memory_history`) since
before the process first allocated on the device. The model carries out `alloc` and `free_completed`; the `segment_` entries say
what the device really did. When the trace gives back segments, the model empties its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memopt.plan.allocator import Allocator, Settings

_TAKES = ("segment_alloc", "segment_map")
_GIVES = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`steps`: (index of the entry, reserved bytes as recorded, as predicted) after every allocation and every free."""

    steps: tuple[tuple[int, int, int], ...]

    @property
    def recorded_peak(self) -> int:
        return max((recorded for _, recorded, _ in self.steps), default=0)

    @property
    def predicted_peak(self) -> int:
        return max((predicted for _, _, predicted in self.steps), default=0)

    @property
    def error(self) -> float:
        """The error of the predicted peak, as a share of the recorded one."""
        return self.predicted_peak / self.recorded_peak - 1 if self.recorded_peak else float(bool(self.predicted_peak))

    @property
    def first_difference(self) -> tuple[int, int, int] | None:
        return next((step for step in self.steps if step[1] != step[2]), None)


def compare(trace: Iterable[Mapping[str, Any]], settings: Settings | None = None) -> Comparison:
    """Carry out the requests of a trace and compare. Frees of allocations from before the trace are ignored."""
    model = Allocator(settings)
    recorded, emptied = 0, False
    steps = []
    for i, entry in enumerate(trace):
        action, nbytes = entry["action"], entry["size"]
        if action in _TAKES:
            recorded += nbytes
        elif action in _GIVES:
            recorded -= nbytes
            if not emptied:
                model.empty_cache()
            emptied = True
            continue
        elif action == "alloc":
            model.alloc(entry["addr"], nbytes, entry.get("stream", 0))
        elif action == "free_completed":
            model.free(entry["addr"])
        if action in ("alloc", "free_completed"):
            steps.append((i, recorded, model.reserved))
        emptied = False
    return Comparison(tuple(steps))
