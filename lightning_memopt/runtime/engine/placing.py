"""Placing: which op of the plan a recorded op is. An op that is not at its position, or reads other tensors, is looked for
(rejoining.py).

Sizes that data decides on (the tokens of an expert) are free. Results of an op that does not match (another branch, another
shape, an extra op) are kept: memory may grow, numbers cannot.
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

    places: finds where ops belong that are not at their position.
    unproven: the plan may be that of another model: no op is looked for elsewhere.
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
        self._fits = learned.fits
        self._of_storage = of_storage

    def place(self, record: OpRecord, given: Given) -> Place | None:
        """An op was recorded: where it belongs, None where it is not the plan's. What it made, what it reads and what stays is
        set accordingly.
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
            for version, tensor in place.others:
                self._read_instead(version, tensor, place.position, given)
            call = record.call
            if place.others and call is not None and call.repeats and self.holdings.startable(record.reads):
                for version, _ in record.made:  # what it reads instead is held now
                    version.holding.reachable = record.remakes(version)
        unheld = False
        for version in (*record.reads, *(new for _, new, _ in record.mutates)):
            pinned = version.holding.claim is Claim.PINNED
            if version.external and not pinned and not self.holdings.starts_from(version):
                version.holding.drop()  # it was held until it is known which op this is
                unheld = True
        if place is not None:
            self._placed(record, made, place)
        elif unheld:
            for version, _ in made:
                version.holding.reachable = False  # its call reads what is not held
        return place

    def _aside(self, record: OpRecord, place: Place | None, given: Given) -> bool:
        """Whether the op that is being recorded has to do with neither weights, nor gradients, nor memory of the plan that it
        would change, and leaves out only such ops: backward is what it is without it.
        """
        if place is not None:
            others = range(self.cursor.position, place.position + bool(place.others))
            if not self.program.aside.issuperset(others):
                return False
        args, kwargs = given
        read = tensors_in([*args, *kwargs.values()])
        if any(t.requires_grad or (is_plain(t) and storage_id(t) in self.places.parameters) for t in read):
            return False
        return all(old.holding.tensor is None for old, _, _ in record.mutates)

    def _placed(self, record: OpRecord, made: Made, place: Place) -> None:
        """The op is the plan's: what it made are tensors of the plan."""
        program, versions = self.program, self.versions
        j = place.position
        self.cursor.match(j)
        for (version, _), tensor in zip(made, program.outputs[j], strict=True):
            version.holding.tensor = tensor
            versions[tensor] = version
            excess_nbytes = version.nbytes - program.graph.tensors[tensor].nbytes
            self.cursor.deviation.excess_nbytes += max(0, excess_nbytes)
        if record.call is not None:
            record.call.op = number_of(j)
        again = j in program.schedule.rebuilt
        if not again:  # the tensors it reads are let go: it cannot run again, as little as by its template
            for version, _ in record.made:
                if not version.empty:
                    version.call, version.holding.reachable = None, False
        for version, t in made:
            own = version.holding.tensor
            if again and record.call is None and own is not None and not version.empty:
                # it starts from memory that it did not start from when it was observed (another library's): its result stays
                self.holdings.hold(version, t)
                self.holdings.guard.keep({version.id}, self._wanted_until([own]))
            elif own in program.holds:
                version.call = version.call if again else None
                self.holdings.hold(version, t)

    def reads_as_planned(self, record: OpRecord, place: Place) -> bool:
        """Whether the op, which belongs there, reads the plan's own tensors."""
        inputs = self.program.inputs[place.position]
        return all(version.holding.tensor == t for version, t in zip(record.reads, inputs, strict=True))

    def _read_instead(self, version: Version, tensor: int, j: int, given: Given) -> None:
        """The plan's op `j` read the version where the plan has `tensor`. Where that was not made, the version
        stands in for it.

        The bytes that a rebuild will need stay: they are held as the plan holds the tensor, or are within reach of what is
        held, which then stays; or, where they could not be made again, they are held for as long as the plan wants any of the
        version's tensors.
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
                guard.stands.setdefault(version.id, []).append(tensor)
        if not wanted:
            return
        starts = starts_of(version, versions)
        lost = starts is None
        if starts is None:
            version.call = None  # it starts from what was let go
            starts, held = {version.id}, True
        if held and holding.claim is not Claim.PINNED:
            self.holdings.hold(version, self._argument(version, given), tensor)
        names = [tensor, holding.tensor, *guard.stands.get(version.id, ())] if lost else [tensor]
        guard.keep(starts, None if taken else self._wanted_until(names))

    def _wanted_until(self, names: list[int | None]) -> int | None:
        """The last point at which the plan wants any of these tensors; None, for to the end, where it does not say."""
        made = [name for name in names if name is not None and name in self.program.graph.producers]
        return max(map(self.program.wanted_until, made)) if len(made) == len(names) else None

    def _argument(self, version: Version, given: Given) -> torch.Tensor:
        """A tensor on the version, among the arguments of the op that is being recorded."""
        args, kwargs = given
        return next(t for t in tensors_in([*args, *kwargs.values()]) if self._of_storage.get(storage_id(t)) is version)

    def _same(self, reads: tuple[Version, ...], made: Made, j: int) -> bool:
        """Whether this is the plan's op `j`. A tensor that was made before the forward is matched where it is first met."""
        inputs, outputs = self.program.inputs[j], self.program.outputs[j]
        versions, fits = self.versions, self._fits
        if len(inputs) != len(reads) or len(outputs) != len(made) or not versions.keys().isdisjoint(outputs):
            return False
        if not all(fits(version.nbytes, tensor) for (version, _), tensor in zip(made, outputs, strict=True)):
            return False
        pairs = zip(reads, inputs, strict=True)
        return all(versions.get(tensor) is version or self._may_be(version, tensor) for version, tensor in pairs)

    def meet(self, version: Version, tensor: int) -> None:
        """A tensor that was made before the forward is met where the plan reads `tensor`."""
        if self._may_be(version, tensor):
            self._is(version, tensor)

    def _may_be(self, version: Version, tensor: int) -> bool:
        """Whether a tensor that was made before the forward may be the plan's."""
        free = version.holding.tensor is None and version.external and tensor not in self.versions
        return free and self._fits(version.nbytes, tensor)

    def _is(self, version: Version, tensor: int) -> None:
        """A tensor that was made before the forward is the plan's. Where ops of the plan that did not run make that, it stays
        for as long as rebuilds may start from it, however often the plan drops the tensor: nothing makes this one again.
        """
        version.holding.tensor = tensor
        self.versions[tensor] = version
        if tensor in self.program.starts and self.program.graph.tensors[tensor].born_at != BEFORE:
            self.holdings.guard.keep({version.id}, self.program.wanted_until(tensor))
