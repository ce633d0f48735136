"""How long the bytes of a forward are held under a plan: as the plan says, or longer where the forward deviates from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_memopt.graph import BEFORE
from lightning_memopt.record import uncompiled
from lightning_memopt.runtime.engine.cursor import Cursor
from lightning_memopt.runtime.engine.guard import Guard
from lightning_memopt.runtime.engine.holding import Claim, Holding, Holdings, Version, can_make, rebuildable
from lightning_memopt.runtime.engine.parking import Parking
from lightning_memopt.runtime.engine.program import Program


class PlannedHoldings(Holdings):
    """Decides what is held of the storage versions of one forward under a plan.

    program: the plan.
    cursor: how far the step has come.
    active: tensors that the plan has in memory now.
    guard: versions that stay longer than the plan says.
    parking: the parked tensors.
    versions: the versions of the tape, by id.
    """

    def __init__(
        self, program: Program, cursor: Cursor, guard: Guard, parking: Parking, versions: Mapping[int, Version]
    ) -> None:
        self.program = program
        self.cursor = cursor
        self.guard = guard
        self.parking = parking
        self.versions = versions
        self.active = parking.active

    # -- told by the recorder ----------------------------------------------------------------------

    def makes_again(self, version: Version) -> bool:
        """See `Holdings`. If no value is held, there is nothing to drop, so the slow question is not asked."""
        return rebuildable(version) and (version.holding.value is None or can_make(version, self.versions))

    def overwrites(self, version: Version) -> None:
        holding: Holding = version.holding
        if holding.parked is not None:
            holding.parked.wait_copied()  # A2
            if holding.parked.exact:
                holding.drop()  # its value is an alias of the memory that is about to change
        if version.external and holding.tensor is not None and not self.starts_from(version):
            holding.drop()  # no rebuild starts from it, so no copy is needed
        super().overwrites(version)

    def copy(self, version: Version) -> None:
        overwritten = version.holding.tensor in self.program.packed_then_overwritten
        if overwritten and version.id not in self.guard.stand_ins and version.id not in self.guard.needed:
            version.holding.drop()  # the new bytes are held, and read instead
        else:
            super().copy(version)

    def overwritten(self, old: Version, new: Version, t: torch.Tensor, reachable: bool) -> None:
        super().overwritten(old, new, t, reachable)
        if new.holding.claim is Claim.PINNED and not old.read:  # from now on the new version holds this memory
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
            new.holding.hold(t)  # autograd will read whatever bytes are in this memory
            new.holding.claim = Claim.PINNED
        return held

    # -- what the plan says ------------------------------------------------------------------------

    def hold(self, version: Version, t: torch.Tensor, tensor: int | None = None) -> None:
        """Hold the version, because the plan holds its tensor from its birth, or holds `tensor`, which the version stands in
        for.
        """
        holding: Holding = version.holding
        if version.empty:
            return
        if tensor is None and holding.tensor in self.program.unsaved and holding.parked is None:
            self.parking.park(version, t)
        tensor = holding.tensor if tensor is None else tensor
        assert tensor is not None
        holding.hold(t)
        if holding.claim is Claim.PINNED:
            holding.claim = Claim.POSSIBLE  # the plan knows all its readers, those through earlier saves included
        holding.reachable = holding.reachable or version.call is None
        self.active.add(tensor)

    def starts_from(self, version: Version) -> bool:
        """Whether rebuilds may start from a version that no recorded op made."""
        return version.holding.tensor in self.program.starts or version.id in self.guard.needed

    def lives(self, version: Version) -> bool:
        """Whether the plan has the version's bytes in memory now."""
        stand_ins = self.guard.stand_ins
        if version.id in stand_ins and not self.active.isdisjoint(stand_ins[version.id]):
            return True
        return version.holding.tensor in self.active

    # -- in backward -------------------------------------------------------------------------------

    @uncompiled
    def free(self, version: Version) -> None:
        """The plan frees the bytes within a segment: drop them, unless they are needed longer."""
        if version.id in self.guard.needed or self.lives(version) or self.parking.must_stay(version):
            return
        if version.holding.parked is not None or self.may_drop(version):
            version.holding.drop()

    @uncompiled
    def let_go(self, version: Version) -> None:
        """A life of the version's tensor has ended: drop the bytes if that is possible."""
        holding: Holding = version.holding
        if holding.parked is not None and holding.tensor is not None:
            needed = version.id in self.guard.needed
            if not self.parking.must_stay(version) and not (needed and not holding.parked.exact):
                self.parking.let_go(version)
                last = self.program.last_fetch.get(holding.tensor, BEFORE)
                out_of_order = self.cursor.out_of_order
                if holding.handles == 0 and not out_of_order and self.cursor.point >= last and not needed:
                    holding.unpark()  # A4
        elif self.may_drop(version):
            holding.drop()

    def may_drop(self, version: Version) -> bool:
        """Whether bytes that are not parked may be dropped: they can be rebuilt, or nobody reads them again."""
        holding: Holding = version.holding
        if holding.claim is Claim.PINNED:
            return False
        last = BEFORE if holding.tensor is None else self.program.last_fetch.get(holding.tensor, BEFORE)
        fetched_later = self.cursor.point < last  # the plan fetches it later, but this step did not park it
        if not (self.cursor.out_of_order or version.id in self.guard.needed or fetched_later):
            return True
        return can_make(version, self.versions)

    def unguard(self, version: Version) -> None:
        """The guard no longer needs the version: drop it if the plan has already dropped its tensor."""
        holding: Holding = version.holding
        stands_in = version.id in self.guard.stand_ins and (can_make(version, self.versions) or holding.handles == 0)
        held = holding.tensor in self.program.holds or stands_in
        if held and not self.lives(version) and self.may_drop(version) and not self.parking.must_stay(version):
            holding.drop()
