"""What is held of a forward under a plan: as long as the plan says, longer where the forward deviates from it."""

from __future__ import annotations

import torch

from lightning_memopt.graph import BEFORE
from lightning_memopt.runtime.engine.cursor import Cursor
from lightning_memopt.runtime.engine.guard import Guard
from lightning_memopt.runtime.engine.holding import Claim, Holding, Holdings, Version, rebuildable
from lightning_memopt.runtime.engine.parking import Parking
from lightning_memopt.runtime.engine.program import Program


class PlannedHoldings(Holdings):
    """See the module.

    active: tensors that the plan has in memory now.
    guard: versions that stay longer than the plan says.
    parking: the parked tensors.
    """

    def __init__(self, program: Program, cursor: Cursor, guard: Guard, parking: Parking) -> None:
        self.program = program
        self.cursor = cursor
        self.guard = guard
        self.parking = parking
        self.active = parking.active

    # -- told by the recorder ----------------------------------------------------------------------

    def overwrites(self, version: Version) -> None:
        holding: Holding = version.holding
        if holding.parked is not None:
            holding.parked.wait_copied()  # A2
            if holding.parked.exact:
                holding.drop()  # else an alias of the memory that is about to change
        if version.external and holding.tensor is not None and not self.starts_from(version):
            holding.drop()  # no rebuild starts from it: nothing to copy
        super().overwrites(version)

    def copy(self, version: Version) -> None:
        outdated = version.holding.tensor in self.program.outdated
        if outdated and version.id not in self.guard.stands and version.id not in self.guard.needed:
            version.holding.drop()  # the bytes that come are held, and read in its place
        else:
            super().copy(version)

    def overwritten(self, old: Version, new: Version, t: torch.Tensor, reachable: bool) -> None:
        super().overwritten(old, new, t, reachable)
        if new.holding.claim is Claim.PINNED and not old.read:  # the new version carries the bytes from here on
            old.holding.drop()
            if old.holding.claim is Claim.PINNED:
                old.holding.claim = Claim.POSSIBLE

    def replaced(self, old: Version, new: Version, t: torch.Tensor) -> bool:
        before: Holding = old.holding
        if before.parked is not None and before.tensor is not None and not before.parked.copied:
            before.unpark()  # A2: it may have changed while it was copied
            self.guard.keep({old.id})
        held = super().replaced(old, new, t)
        if new.holding.claim is not Claim.NONE:
            new.holding.hold(t)  # autograd reads the bytes in this memory, whatever they will be
            new.holding.claim = Claim.PINNED
        return held

    # -- what the plan says ------------------------------------------------------------------------

    def hold(self, version: Version, t: torch.Tensor, tensor: int | None = None) -> None:
        """The plan holds this version's tensor from its birth, or `tensor`, which the version stands in for."""
        holding: Holding = version.holding
        if version.empty:
            return
        if tensor is None and holding.tensor in self.program.unsaved and holding.parked is None:
            self.parking.park(version, t)
        tensor = holding.tensor if tensor is None else tensor
        assert tensor is not None
        holding.hold(t)
        if holding.claim is Claim.PINNED:
            holding.claim = Claim.POSSIBLE  # the plan knows who reads it, also who reads it through an earlier save
        holding.reachable = holding.reachable or version.call is None
        self.active.add(tensor)

    def starts_from(self, version: Version) -> bool:
        """Whether rebuilds may start from a version that no recorded op made."""
        return version.holding.tensor in self.program.starts or version.id in self.guard.needed

    def lives(self, version: Version) -> bool:
        """Whether the plan has the version's bytes in memory now."""
        stands = self.guard.stands
        if version.id in stands and not self.active.isdisjoint(stands[version.id]):
            return True
        return version.holding.tensor in self.active

    # -- in backward -------------------------------------------------------------------------------

    def free(self, version: Version) -> None:
        """The plan frees the bytes in the middle of a segment: they go, unless somebody needs them longer."""
        if version.id in self.guard.needed or self.lives(version) or self.parking.must_stay(version):
            return
        if version.holding.parked is not None or self.may_go(version):
            version.holding.drop()

    def let_go(self, version: Version) -> None:
        """No life of the version's tensor goes on."""
        holding: Holding = version.holding
        if holding.parked is not None and holding.tensor is not None:
            needed = version.id in self.guard.needed
            if not self.parking.must_stay(version) and not (needed and not holding.parked.exact):
                self.parking.let_go(version)
                last = self.program.last_fetch.get(holding.tensor, BEFORE)
                astray = self.cursor.deviation.astray
                if holding.handles == 0 and not astray and self.cursor.point >= last and not needed:
                    holding.unpark()  # A4
        elif self.may_go(version):
            holding.drop()

    def may_go(self, version: Version) -> bool:
        """Whether bytes that are not parked may go: they can be rebuilt, or nobody reads them again."""
        holding: Holding = version.holding
        if holding.claim is Claim.PINNED:
            return False
        if rebuildable(version):
            return True
        last = BEFORE if holding.tensor is None else self.program.last_fetch.get(holding.tensor, BEFORE)
        comes_back = self.cursor.point < last  # but it was not parked
        return not (self.cursor.deviation.astray or version.id in self.guard.needed or comes_back)

    def unguard(self, version: Version) -> None:
        """The version is not needed longer than the plan says any more; it goes where it should have gone before."""
        holding: Holding = version.holding
        stands = version.id in self.guard.stands and (rebuildable(version) or holding.handles == 0)
        held = holding.tensor in self.program.holds or stands
        if held and not self.lives(version) and self.may_go(version) and not self.parking.must_stay(version):
            holding.drop()
