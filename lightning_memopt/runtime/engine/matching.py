"""Record a forward under a plan, and find the plan's op for each recorded op (placing.py).

The native engine sees each op first. An op that matches its template (templates.py) runs there, and is not recorded. Without a
native engine, every op is recorded.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch

from lightning_memopt.device.places import generator_of
from lightning_memopt.record import UNKNOWN, UNSHARED, Call, OpRecord, Recorder, Tape, storage_id, uncompiled
from lightning_memopt.record.protocols import Owner
from lightning_memopt.runtime.engine.holding import Holding, Version
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.placing import Placing
from lightning_memopt.runtime.engine.planned_holdings import PlannedHoldings
from lightning_memopt.runtime.engine.rejoining import SPREAD
from lightning_memopt.runtime.engine.templates import Template, in_passing, start_of, template_of, with_state
from lightning_memopt.torch_private import OpOverload, backward_task


class Matcher(Recorder):
    """The recorder of a `PlannedEngine`. `capturing`, `native` and `templates` belong to the native engine, where that is
    loaded (`matcher_for`).

    program: the plan.
    cursor: how far the forward has come.
    placing: finds the plan's op for a recorded op.
    templates: the templates of the ops of this forward, in the native engine's form.
    native: this object's data for the native engine; None where there is no native engine.
    """

    holdings: PlannedHoldings
    native: object
    templates: object

    def __init__(self, owner: Owner, tape: Tape[Holding], holdings: PlannedHoldings, learned: Learned, unproven: bool) -> None:
        super().__init__(tape, owner)
        self.program = learned.program
        self.cursor = holdings.cursor
        self.placing = Placing(learned, tape, holdings, self.of_storage, unproven)
        self._learned = learned
        self.templates = learned.templates.current()
        self.next_id = len(self.program.graph.tensors)  # ids below are the plan's own
        self._unread: list[tuple[Version, weakref.ref[torch.Tensor]]] = []
        self._unknown = False
        self._given: tuple[tuple, dict] = (), {}
        self._engine = learned.native
        self.native = self._seen_natively()

    def _seen_natively(self) -> object:
        engine = self._engine
        if engine is None:
            return None
        saving = self.program.saving
        if self._learned.templates.restless:
            saving = b"\1" * len(saving)
        step = self.of_storage, self.tape.versions, self._beneath, self._unread, self.cursor, self.holdings.active
        return engine.forward(*step, self._learned.familiar, saving)

    @uncompiled
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        cursor = self.cursor
        if cursor.fence < cursor.position:
            self.holdings.parking.pass_fences()
        if backward_task() != -1:
            self._learned.templates.restless = True
        self._unknown = True
        self._given = args, kwargs or {}
        try:
            return self.record(func, args, kwargs or {})
        finally:
            self._unknown = False
            self._given = (), {}

    def _starts(self) -> bool:
        """True while it is not known which op of the plan runs: rebuilds may start from its inputs."""
        return self.capturing and (self._unknown or self.cursor.position in self.program.schedule.rebuilt)

    def _changed(self, version: Version, t: torch.Tensor) -> Version:
        """As planned, `t` may be one piece of the storage and another piece was read before: the op that cut it, and would have
        said so, ran unrecorded.
        """
        if self.placing.is_in_pieces(version):
            version.counter = UNSHARED
            return version
        return super()._changed(version, t)

    def _overwritten(self, old: Version, t: torch.Tensor, call: Call | None, reachable: bool, id: int | None = None) -> Version:
        new = super()._overwritten(old, t, call, reachable, id)
        self._unread.append((new, weakref.ref(t)))
        return new

    @property
    def _begun(self) -> bool:
        return self.op > 0 or self.cursor.position > 0

    def settings_changed(self) -> None:
        super().settings_changed()
        templates = self._learned.templates
        self.templates = templates.none() if self.elsewhere else templates.learned

    def settle(self) -> bool:
        """Before ops run unrecorded, read the counters that autograd has moved since the writes. Returns whether it could."""
        unread = self._unread.copy()
        self._unread.clear()
        for version, ref in unread:
            if version.counter == UNKNOWN and not version.stale and version.alive() is not None:
                t = ref()
                if t is None:
                    self._unread.extend(unread)
                    return False
                self._current(version, t)
        return True

    # -- called by the native engine ---------------------------------------------------------------

    @uncompiled
    def adopts(self, t: torch.Tensor, tensor: int) -> Version:
        """An op reads `t`, which is from outside the forward, where the plan has `tensor`."""
        version = self.adopt(t)
        self.placing.meet(version, tensor, t)
        return version

    @uncompiled
    def drawn(self, call: Call, device: torch.device) -> Call | None:
        """The call of a random op that is about to run, with the generator's present state."""
        generator = generator_of(device)
        return None if generator is None else with_state(call, generator)

    @uncompiled
    def overwrites(self, t: torch.Tensor) -> None:
        """An op is about to write to `t`."""
        self._overwrites(self.of_storage[storage_id(t)])

    @uncompiled
    def overwritten(self, t: torch.Tensor, call: Call | None, startable: bool, id: int) -> None:
        """An op has written to `t`, and made tensor `id` of the plan. `startable`: a rebuild can use all that the op reads."""
        new = self._overwritten(self.of_storage[storage_id(t)], t, call, startable, id)
        new.holding.tensor = id
        if id in self.program.holds:
            self.holdings.hold(new, t)

    @uncompiled
    def another_result(self) -> None:
        """A result is of another kind than planned. That can happen, because the arguments of its op were not compared."""
        self.cursor.deviate("a result of another kind")

    @uncompiled
    def holds(self, t: torch.Tensor, version: Version) -> None:
        """Hold a result, as the plan does from the birth of its tensor."""
        self.holdings.hold(version, t)

    @uncompiled
    def unforeseen(self, t: torch.Tensor, tensor: int) -> None:
        """A result has another size than the plan's tensor, although all arguments of the op are as planned."""
        if storage_id(t) not in self.of_storage:
            self._new(t).why = "its size changes from step to step"
        self.cursor.deviate("a result of another size")

    # -- all other ops --------------------------------------------------------------------------------

    def _number(self) -> int:
        self.op += 1
        self.cursor.furthest = max(self.cursor.furthest, self.cursor.position)
        return (self.cursor.furthest << SPREAD) + self.op

    def _recorded(self, record: OpRecord) -> None:
        place = self.placing.place(record, self._given)
        engine = self._engine
        if engine is not None and place is not None and self.placing.reads_as_planned(record, place):
            engine.learn(self.templates, place.position, self._template(engine, record, place.position))

    def _template(self, engine: Any, record: OpRecord, j: int) -> Template | OpOverload | None:
        if self.program.passes(j):
            return in_passing(engine, record)
        if j in self.program.schedule.rebuilt:
            return template_of(engine, record, self.tape.versions)
        return start_of(engine, record, self.program.tracked)


@cache
def matcher_for(native: Any) -> type[Matcher]:
    """The class of matchers: some of their fields belong to `native`, the native engine, if there is one."""
    return Matcher if native is None else type("Matcher", (Matcher, native.Matching), {})
