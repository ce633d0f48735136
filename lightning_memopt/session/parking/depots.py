"""The depots of the plans in force: each has tiers with room for the parked tensors of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lightning_memopt.plan import Plan
from lightning_memopt.plan.forms import tier_of
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier, HostTier, Tier
from lightning_memopt.units import round_up

_ALIGN_NBYTES = 4096


class Depots:
    """The depot of each plan.

    device: the device whose tensors are parked.
    directory: the folder for files of the disk tier; None for the system's temporary folder.
    """

    def __init__(self, device: torch.device, directory: str | None) -> None:
        self.device = device
        self.directory = directory
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
        return known[1]

    def _new(self, plan: Plan) -> Depot | None:
        fetched = {life.tensor: life for life in plan.lives if life.how == "fetch"}
        if not fetched:
            return None
        nbytes: dict[str, int] = {}
        for life in fetched.values():
            if name := tier_of(life.form):
                nbytes[name] = nbytes.get(name, 0) + round_up(life.parked_nbytes, _ALIGN_NBYTES)

        def new_tier(name: str) -> Tier:
            return self.tier(name, nbytes[name])

        return Depot({name: new_tier(name) for name in nbytes}, more=new_tier)

    def tier(self, name: str, nbytes: int) -> Tier:
        """A new tier of this name, with room for `nbytes` bytes."""
        return DiskTier(nbytes, self.directory, self.device) if name == "disk" else HostTier(nbytes, self.device)

    def close(self) -> None:
        """Close the depots of all plans."""
        for key in list(self._of_plan):
            self._end(key)

    def _end(self, key: int) -> None:
        _, depot = self._of_plan.pop(key)
        if depot is not None:
            depot.retire()  # a handle may still ask for its tensor after the session has closed
