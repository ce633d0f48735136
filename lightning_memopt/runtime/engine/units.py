"""Find out, while a forward is observed, which weights of sharded modules a rebuild would read.

The weights of a unit are in memory only while the unit runs (record/gathered.py). When backward asks for what a unit saved, the
weights of this unit are in memory, and those of other units that reshard are not. So a rebuild must not need the weights of two
units: a tensor that one unit makes from its weights and another one reads is held, and never rebuilt. A tensor that was made
without weights that go may be rebuilt anywhere.
"""

from __future__ import annotations

import torch

from lightning_memopt.record import OpRecord
from lightning_memopt.runtime.engine.holding import Version

_NONE: frozenset[int] = frozenset()


class Units:
    """The units of one forward, by the ids of their objects.

    running: units whose forward has begun and is not over, the innermost last.
    """

    def __init__(self) -> None:
        self.running: list[int] = []
        self._reads: dict[int, frozenset[int]] = {}
        """Id of a version -> the units whose weights a rebuild of it would read, or whose weight it is. Only where there are
        any.
        """

    def gathered(self, weight: Version, unit: int) -> None:
        """An op reads a weight of a unit, which is freed when the unit's forward is over."""
        self._reads[weight.id] = frozenset((unit,))

    def crosses(self, version: Version, t: torch.Tensor) -> bool:
        """An op of the innermost running unit is about to read the version, through `t`. If the version comes from another
        unit, hold it from now on. Returns whether it does.
        """
        if version.call is None or not self._reads.get(version.id, _NONE).difference(self.running[-1:]):
            return False
        version.holding.hold(t)
        version.holding.reachable = True
        version.call, version.why = None, "its rebuild reads sharded weights, which are away when it is needed"
        del self._reads[version.id]
        return True

    def recorded(self, record: OpRecord) -> None:
        """An op ran."""
        units = _NONE.union(*(self._reads.get(version.id, _NONE) for version in record.reads))
        if units:
            for version in (*(version for version, _ in record.made), *(new for _, new, _ in record.mutates)):
                if version.call is not None:
                    self._reads[version.id] = units
