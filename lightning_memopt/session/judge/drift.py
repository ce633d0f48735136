"""How the forwards under a plan differ from the plan."""

from __future__ import annotations

import os
import warnings

from lightning_memopt.errors import PlanMismatchError
from lightning_memopt.graph import fingerprint
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.runtime.engine.cursor import PlanDeviation
from lightning_memopt.session.judge.patience import PATIENCE
from lightning_memopt.units import format_nbytes


class Drift:
    """What the forwards under one plan have shown.

    matched: a forward matched the plan.
    deviated: a forward deviated from it.
    in_a_row: forwards in a row that deviated by more than a little.
    deviations: those of the forwards of this step.
    excess_nbytes: the largest sum of bytes by which tensors of a forward exceeded the planned sizes.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.matched = self.deviated = False
        self.in_a_row = self.excess_nbytes = 0
        self.deviations: list[PlanDeviation] = []

    @property
    def inputs_changed(self) -> frozenset[int]:
        """Ops that the plan runs again although a step changed their inputs too early: the backward of that step raised."""
        changed = set[int]()
        for deviation in self.deviations:
            changed |= deviation.changed
        if not changed:  # each step asks
            return frozenset()
        return frozenset(op.id for op in self._program.graph.forward if not changed.isdisjoint(op.inputs))

    def step_ended(self) -> bool:
        """The step is over. Returns whether a backward of it ran out of the plan's order."""
        out_of_order = False
        for deviation in self.deviations:
            out_of_order = out_of_order or deviation.out_of_order
        self.deviations.clear()
        return out_of_order

    def compare(self, engine: PlannedEngine, given: str | os.PathLike[str] | None, lent: bool) -> bool:
        """After a forward: note how it deviates, and warn about the first one that does. Returns whether the bytes of the step
        are no longer those that were predicted. `given`: the file of a plan that the user gave and no forward has matched yet.
        `lent`: the plan is one of another batch.

        A forward deviates where a planned save is missing because its op did not run, or where autograd saved a tensor that
        the plan does not know. Ops that save nothing (a metric, a log) do not count, nor do ops after the model's own forward:
        those are not recorded. Raises PlanMismatchError where the forward deviates from a given plan.
        """
        graph, names = self._program.graph, self._program.names
        at, deviation = engine.cursor.position, engine.cursor.deviation
        self.deviations.append(deviation)
        larger = deviation.excess_nbytes > self.excess_nbytes and not lent
        self.excess_nbytes = max(self.excess_nbytes, deviation.excess_nbytes)
        left = graph.forward[at:]
        missing = any([t in graph.saves_of for op in left if op.recomputable for t in op.outputs]) if left else False
        if not missing and not deviation.unplanned_nbytes:
            self.matched = True
            self.in_a_row = 0
            return (deviation.unparked_nbytes > 0 and self._tell_unparked(deviation.unparked_nbytes)) or larger
        at, name = deviation.first or (at, "nothing more")
        planned = names[at] if at < len(names) else "nothing more"
        if given is not None:
            op = graph.forward[at] if at < len(graph.forward) else None
            where = f" in {op.scope}" if op is not None and op.scope else ""
            raise PlanMismatchError(
                f"The plan {given} was made for another model (its fingerprint is {fingerprint(graph)}): at op {at} it "
                f"expects {planned}{where}, the model ran {name}. Nothing was updated. Remove plan=, or give the plan of this "
                "model and batch size."
            )
        much = PATIENCE.left_out_times * deviation.unplanned_nbytes > engine.left_out_nbytes()
        self.in_a_row = self.in_a_row + 1 if much else 0
        if not lent and not self.deviated:
            other = f"{name} instead of {planned}" if name != planned else f"{name} of other sizes or values"
            warnings.warn(
                f"MemOpt: the forward left the plan at op {at} ({other}). Tensors that do not match are kept: "
                "memory may rise, results do not change.",
                stacklevel=3,
            )
        self.deviated = True
        return True

    def _tell_unparked(self, nbytes: int) -> bool:
        """Warn about the first tensors that the tier has no room for. Returns True."""
        if not self.deviated:
            warnings.warn(
                f"MemOpt: the tier has no room for {format_nbytes(nbytes)} that the plan parks, as where a forward begins "
                "before the backward of another one: they stay on the device. Memory rises, results do not change.",
                stacklevel=4,
            )
        self.deviated = True
        return True
