"""The depots of the plans in force: each has tiers with room for the parked tensors of one step.

All tiers together keep a limit. Where it does not allow those of several plans at once, a plan gets the tiers of one whose
tensors are all on the device, or these are closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from lightning_memopt.errors import TierFullError
from lightning_memopt.plan import Plan
from lightning_memopt.plan.model import saved_in_tiers
from lightning_memopt.plan.tiers import ALIGN_NBYTES
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier, HostTier, Tier
from lightning_memopt.runtime.tiers.room import taken_nbytes


class Depots:
    """The depot of each plan.

    device: the device whose tensors are parked.
    directory: the folder for files of the disk tier; None for the system's temporary folder.
    limit_nbytes: the most bytes that this process may have in such tiers; None if no limit is known.
    """

    def __init__(self, device: torch.device, directory: str | None) -> None:
        self.device = device
        self.directory = directory
        self.limit_nbytes: int | None = None
        self._of_plan: dict[int, tuple[Plan, Depot | None]] = {}

    def of(self, plan: Plan, in_force: Callable[[], Iterable[Plan]] | None = None) -> Depot | None:
        """The depot of a plan, the same one at each call; None where the plan parks nothing.

        Depots of plans that are not `in_force` any more are closed, unless tensors are parked there. None: none is closed.
        """
        known = self._of_plan.get(id(plan.lives))  # a plan gets addresses later, and keeps its lives
        if known is None:
            kept = None if in_force is None else {id(p.lives) for p in in_force()}
            for key, (_, depot) in list(self._of_plan.items()):
                if kept is not None and key not in kept and (depot is None or not depot.used_nbytes):
                    self._end(key)
            known = self._of_plan[id(plan.lives)] = plan, self._new(plan)
        depot = known[1]
        if depot is not None and len(depot.tiers) < len(depot.wanted):
            self._fill(depot)
        return depot

    def _new(self, plan: Plan) -> Depot | None:
        if not plan.parks:
            return None
        wanted = saved_in_tiers(plan.lives)
        return Depot(wanted=wanted, more=lambda name: self.tier(name, wanted[name]))

    def _fill(self, depot: Depot) -> None:
        """Give a depot the tiers that it has not."""
        for name, nbytes in depot.wanted.items():
            if name in depot.tiers:
                continue
            if self._left_nbytes(name) < nbytes:
                other = next((each for each in self._idle() if each.capacity_nbytes(name) >= nbytes), None)
                if other is not None:
                    depot.take_over(name, other)
                    continue
            with contextlib.suppress(TierFullError):  # without it, tensors stay on the device
                depot.tiers[name] = self.tier(name, nbytes)

    def tier(self, name: str, nbytes: int) -> Tier:
        """A new tier of this name, with room for `nbytes` bytes, or for as many as the limit leaves. Raises TierFullError if
        that is none.
        """
        self.make_room(name, nbytes)
        nbytes = max(min(nbytes, self._left_nbytes(name)), min(nbytes, ALIGN_NBYTES))
        return self._made(name, nbytes, self.limit_nbytes)

    def make_room(self, name: str, nbytes: int) -> None:
        """Close tiers that are empty now, if the limit leaves no room for so many bytes beside them."""
        for depot in self._idle():
            if self._left_nbytes(name) >= nbytes:
                break
            depot.close_tiers()

    def probe(self, name: str, nbytes: int) -> Tier:
        """A tier to measure copies with, whatever the limit."""
        return self._made(name, nbytes, None)

    def _made(self, name: str, nbytes: int, limit_nbytes: int | None) -> Tier:
        if name == "disk":
            return DiskTier(nbytes, self.directory, self.device, limit_nbytes=limit_nbytes)
        return HostTier(nbytes, self.device, limit_nbytes=limit_nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of all tiers."""
        return sum(tier.capacity_nbytes for _, depot in self._of_plan.values() if depot is not None for tier in depot)

    def _left_nbytes(self, name: str) -> int:
        return 1 << 62 if self.limit_nbytes is None else max(0, self.limit_nbytes - taken_nbytes(name))

    def _idle(self) -> list[Depot]:
        """The depots in which nothing is parked now."""
        return [depot for _, depot in self._of_plan.values() if depot is not None and not depot.used_nbytes]

    def close(self) -> None:
        """Close the depots of all plans."""
        for key in list(self._of_plan):
            self._end(key)

    def _end(self, key: int) -> None:
        _, depot = self._of_plan.pop(key)
        if depot is not None:
            depot.retire()  # a handle may still ask for its tensor after the session has closed
