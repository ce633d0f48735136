"""Find the plan's op for a recorded op. If the plan's next op does not match it, rejoining.py searches the plan.

Sizes that depend on data (the number of tokens of an expert) need not match. Results of an op without a match (another branch,
another shape, an extra op) are kept, so a deviation can cost memory, but cannot change numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_memopt.graph import BEFORE
from lightning_memopt.record import OpRecord, StorageVersion, Tape, storage_id, tensors_in
from lightning_memopt.record.tensors import is_plain
from lightning_memopt.runtime.engine.holding import Claim, Holding, Version
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.planned_holdings import PlannedHoldings
from lightning_memopt.runtime.engine.rejoining import Made, Place, Places, number_of, starts_of

Given = tuple[tuple, dict]
"""The real arguments of an op."""


class Placing:
    """Matches the recorded ops of one forward to those of the plan.

    program: the plan.
    cursor: how far the forward has come.
    holdings: decides what is held.
    unproven: whether the plan may be that of another model, so that the rest of the plan is not searched for an op.
    versions: the versions of the tape, by id.
    places: finds ops that are not at their position.
    """

    def __init__(
        self,
        learned: Learned,
        tape: Tape[Holding],
        holdings: PlannedHoldings,
        of_storage: Mapping[int, StorageVersion],
        unproven: bool,
    ) -> None:
        self.program = learned.program
        self.cursor = holdings.cursor
        self.holdings = holdings
        self.unproven = unproven
        self.versions = tape.versions
        self.places = Places(learned, tape.versions)
        self._learned = learned
        self._of_storage = of_storage

    def place(self, record: OpRecord, given: Given) -> Place | None:
        """The place, in the plan, of an op that was just recorded; None if it is not an op of the plan. Matches the versions
        that the op reads and makes to tensors of the plan, and holds or drops them as the plan says.
        """
        cursor, program = self.cursor, self.program
        j = cursor.position
        made = [*record.made, *((new, t) for _, new, t in record.mutates)]
        place: Place | None = Place(j, ())
        at_its_turn = j < len(program.names) and record.func._name == program.names[j] and not cursor.lost
        if not (at_its_turn and self._same(record.reads, made, j)):
            place = self.places.find(record, made, j) if not self.unproven else None
            if place != Place(j, ()):
                cursor.deviate(record.func._name, aside=self._aside(record, place, given))
        if place is not None:
            for version, tensor in zip(record.reads, program.inputs[place.position], strict=True):
                if self._may_be(version, tensor):
                    self._is(version, tensor)
                    if tensor in program.handed_over:
                        self.holdings.hold(version, self._argument(version, given))
            for version, tensor in place.others:
                self._read_instead(version, tensor, place.position, given)
            if place.others and self.holdings.can_run(record.call, record.reads):
                for version, _ in made:  # the versions that it reads instead are held now
                    version.holding.reachable = record.remakes(version)
        unheld = False
        for version in (*record.reads, *(new for _, new, _ in record.mutates)):
            pinned = version.holding.claim is Claim.PINNED
            if version.external and not pinned and not self.holdings.starts_from(version):
                version.holding.drop()  # it was held only until the place of the op was known
                unheld = True
        if place is not None:
            self._placed(record, made, place)
        elif unheld:
            for version, _ in made:
                version.holding.reachable = False  # its call reads what is not held
        return place

    def _aside(self, record: OpRecord, place: Place | None, given: Given) -> bool:
        """Whether backward is the same with and without this op. So it must read neither weights nor tensors with a gradient,
        and not write to memory of the plan, and the same must hold of the ops of the plan that are skipped.
        """
        if place is not None:
            end = place.position + 1 if place.others else place.position
            if not self.program.aside.issuperset(range(self.cursor.position, end)):
                return False
        args, kwargs = given
        read = tensors_in([*args, *kwargs.values()])
        if any(t.requires_grad or (is_plain(t) and storage_id(t) in self.places.parameters) for t in read):
            return False
        return all(old.holding.tensor is None for old, _, _ in record.mutates)

    def _placed(self, record: OpRecord, made: Made, place: Place) -> None:
        """The op is the plan's: the versions that it made are tensors of the plan."""
        program, versions = self.program, self.versions
        j = place.position
        self.cursor.match(j)
        for (version, _), tensor in zip(made, program.outputs[j], strict=True):
            version.holding.tensor = tensor
            versions[tensor] = version
            counted_nbytes = self._learned.counted_nbytes(version.nbytes, version.device)
            excess_nbytes = counted_nbytes - program.graph.tensors[tensor].nbytes
            self.cursor.deviation.excess_nbytes += max(0, excess_nbytes)
        if record.call is not None:
            record.call.op = number_of(j)
        again = j in program.schedule.rebuilt
        if not again:  # the tensors that it reads are not held, so it cannot run again; its template says the same
            for version, _ in record.made:
                if not version.empty:
                    version.call, version.holding.reachable = None, False
        stays = again and not self.holdings.can_run(record.call, record.reads)
        if stays:
            record.call = None  # so that no template is made of it, either
        for version, t in made:
            own = version.holding.tensor
            if stays and own is not None and not version.empty:
                # The plan makes it again, but this step cannot: the op reads memory (of another library) that it did not read
                # when it was observed, or the generator's state was not recorded. So the result stays.
                version.call = None
                self.holdings.hold(version, t)
                self.holdings.guard.keep({version.id}, self._wanted_until([own]))
            elif own in program.holds:
                version.call = version.call if again else None
                self.holdings.hold(version, t)

    def reads_as_planned(self, record: OpRecord, place: Place) -> bool:
        """Whether the op at this place reads the same tensors as in the plan."""
        inputs = self.program.inputs[place.position]
        return all(version.holding.tensor == t for version, t in zip(record.reads, inputs, strict=True))

    def _read_instead(self, version: Version, tensor: int, j: int, given: Given) -> None:
        """The plan's op `j` read the version instead of `tensor`. If `tensor` was not made in this step, the version stands in
        for it.

        Bytes that a rebuild needs stay. Either they are held as the plan holds `tensor`; or they can be rebuilt from held
        versions, which then stay; or else they are held as long as the plan needs any tensor of the version.
        """
        program, versions, guard = self.program, self.versions, self.holdings.guard
        holding: Holding = version.holding
        held, taken = False, tensor in versions
        if taken:
            wanted = j in program.schedule.rebuilt
        else:
            wanted, held = tensor in program.tracked, tensor in program.holds
            if holding.tensor is None:
                self._is(version, tensor)
            else:
                versions[tensor] = version
                guard.stand_ins.setdefault(version.id, []).append(tensor)
        if not wanted:
            return
        starts = starts_of(version, versions)
        lost = starts is None
        if starts is None:
            version.call = None  # the call reads bytes that are not held
            starts, held = {version.id}, True
        if held and holding.claim is not Claim.PINNED:
            self.holdings.hold(version, self._argument(version, given), tensor)
        names = [tensor, holding.tensor, *guard.stand_ins.get(version.id, ())] if lost else [tensor]
        guard.keep(starts, None if taken else self._wanted_until(names))

    def _wanted_until(self, names: list[int | None]) -> int | None:
        """The last point at which the plan needs any of these tensors; None (to the end) if the plan does not know all of
        them.
        """
        made = [name for name in names if name is not None and name in self.program.graph.producers]
        return max(map(self.program.wanted_until, made)) if len(made) == len(names) else None

    def _argument(self, version: Version, given: Given) -> torch.Tensor:
        """The argument, of the op that is being recorded, that is a tensor on the version."""
        args, kwargs = given
        return next(t for t in tensors_in([*args, *kwargs.values()]) if self._of_storage.get(storage_id(t)) is version)

    def _same(self, reads: tuple[Version, ...], made: Made, j: int) -> bool:
        """Whether an op that reads and makes these versions is the plan's op `j`. A tensor that was made before the forward is
        matched when an op first reads it.
        """
        inputs, outputs = self.program.inputs[j], self.program.outputs[j]
        versions, fits = self.versions, self._learned.fits
        if len(inputs) != len(reads) or len(outputs) != len(made) or any(tensor in versions for tensor in outputs):
            return False
        if not all(fits(version, tensor) for (version, _), tensor in zip(made, outputs, strict=True)):
            return False
        pairs = zip(reads, inputs, strict=True)
        return all(versions.get(tensor) is version or self._may_be(version, tensor) for version, tensor in pairs)

    def meet(self, version: Version, tensor: int, t: torch.Tensor) -> None:
        """An op reads `t`, which was made before the forward, where the plan reads `tensor`."""
        if self._may_be(version, tensor):
            self._is(version, tensor)
            if tensor in self.program.handed_over:
                self.holdings.hold(version, t)
            elif version.id not in self.holdings.guard.needed:
                self._learned.familiar[tensor] = version.nbytes, version.device

    def is_in_pieces(self, version: Version) -> bool:
        """Whether the plan knows that this memory is cut into pieces with version counters of their own: the version is matched
        to such a tensor, or the plan's op at the cursor reads one that it may be.
        """
        cut_by = self.program.cut_by
        j = self.cursor.position
        own = version.holding.tensor
        if own is not None:
            return cut_by.get(own, j) < j
        inputs = self.program.inputs[j] if j < len(self.program.inputs) and not self.cursor.lost else ()
        return any(cut_by.get(tensor, j) < j and self._may_be(version, tensor) for tensor in inputs)

    def _may_be(self, version: Version, tensor: int) -> bool:
        """Whether the version was made before the forward and can be matched to this tensor of the plan."""
        free = version.holding.tensor is None and version.external and tensor not in self.versions
        return free and self._learned.fits(version, tensor)

    def _is(self, version: Version, tensor: int) -> None:
        """Match a version that was made before the forward to a tensor of the plan.

        If ops of the plan make the tensor, these ops did not run, and no call can rebuild the version. So it stays as long as
        rebuilds may start from it, even where the plan drops the tensor.
        """
        version.holding.tensor = tensor
        self.versions[tensor] = version
        born = self.program.graph.tensors[tensor].born_at
        if tensor in self.program.starts and born != BEFORE and tensor not in self.program.handed_over:
            self.holdings.guard.keep({version.id}, self.program.wanted_until(tensor))
