"""Record a forward under a plan. Every op is matched to the plan by its position, its overload, the tensors that it reads and
the sizes of its results. An op that matches its template is not recorded again (templates.py). For all other ops, which are
recorded, placing.py finds the plan's op.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_memopt.device.places import device_of_call, generator_of
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import (
    UNKNOWN,
    UNSHARED,
    Call,
    OpRecord,
    Origin,
    Recorder,
    StorageVersion,
    Tape,
    storage_id,
    tensors_in,
    uncompiled,
)
from lightning_memopt.record.protocols import Owner
from lightning_memopt.record.tensors import PLAIN, is_plain
from lightning_memopt.runtime.engine.holding import Holding, Version
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.placing import Placing
from lightning_memopt.runtime.engine.planned_holdings import PlannedHoldings
from lightning_memopt.runtime.engine.rejoining import SPREAD
from lightning_memopt.runtime.engine.templates import (
    Template,
    flattened,
    in_passing,
    same_constant,
    start_of,
    template_of,
    with_state,
)
from lightning_memopt.torch_private import OpOverload, backward_task

_STRIDED = torch.strided
_RECORDED, _EMPTY, _EXTERNAL = Origin.RECORDED, Origin.EMPTY, Origin.EXTERNAL


class Matcher(Recorder):
    """The recorder of a `PlannedEngine`.

    program: the plan.
    cursor: how far the forward has come.
    placing: finds the plan's op for a recorded op.
    templates: the templates of this forward's ops.
    native: this object's data for the native engine; None where Python matches all ops.
    """

    __slots__ = ("capturing", "native", "templates")  # read by the native engine; all else is in `__dict__`
    holdings: PlannedHoldings

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
        self.native = self._seen_natively()

    def _seen_natively(self) -> object:
        engine = loaded()
        if engine is None:
            return None
        tape, program, active = self.tape, self.program, self.holdings.active
        step = self.of_storage, tape.versions, tape.weak_references, self._beneath, self._unread, self.cursor
        saving = program.saving
        if self._learned.templates.restless:
            saving = b"\1" * len(saving)
        return engine.forward(
            *step, program.holds, program.unsaved, active, program.sized_by_data, self._learned.familiar, saving
        )

    @uncompiled
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        cursor = self.cursor
        if cursor.fence < cursor.position:
            self.holdings.parking.pass_fences()
        template = self.templates[cursor.position]
        if template is func and self.capturing and not cursor.lost:
            cursor.advance()
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if type(template) is Template and template.func is func and self.capturing:
            values = flattened(args) if template.nested else args
            startable = self._startable(template, args, kwargs, values)
            if startable is not None:
                return self._repeat(template, args, kwargs, values, startable)
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

    # -- an op that matches its template --------------------------------------------------------------

    def _startable(self, template: Template, args: tuple, kwargs: dict | None, values: Any) -> bool | None:
        """Whether a rebuild can use all tensors that the op reads; None where the op does not match its template."""
        deviates = self.cursor.deviation.first is not None
        if torch.is_inference_mode_enabled() or (template.writes and self._writes_known(template, args)):
            return None
        if template.kwargs is None:
            known = all(storage_id(values[i]) in self.of_storage for i, _ in template.mutates)
            return False if known and not (deviates and self._named(template)) else None
        if len(values) != template.arity or torch.is_grad_enabled() is not template.grad:
            return None
        for i, constant in template.constants:
            value = values[i]
            if value is not constant and not same_constant(value, constant):
                return None
        if kwargs or template.kwargs:
            if kwargs is None or len(kwargs) != len(template.kwargs):
                return None
            for name, constant in template.kwargs:
                if name not in kwargs or not same_constant(kwargs[name], constant):
                    return None
        of_storage, versions = self.of_storage, self.tape.versions
        if deviates and self._named(template):
            return None
        startable = True
        reads = template.call is not None
        for i, view in template.tensors:
            t = values[i]
            if type(t) not in PLAIN or t.layout is not _STRIDED:
                return None
            version = of_storage.get(storage_id(t))
            if version is None:
                if not is_plain(t):
                    return None
                version = self.adopts(t, view.version)
            elif version.counter != t._version and version is not self._current(version, t):
                return None
            holding = version.holding
            tensor = view.version
            if (holding.tensor != tensor and versions.get(tensor) is not version) or not view.same(t):
                return None
            if reads:
                if version.exposed:
                    return None
                version.read = True
                if holding.value is None and version.origin is _EXTERNAL:
                    holding.hold(t)
                if not (holding.reachable or holding.value is not None or version.origin is _EMPTY):
                    startable = False
        return startable

    def _named(self, template: Template) -> bool:
        """Whether the op has already run in this step, so that tensors that it makes are on the tape."""
        versions = self.tape.versions
        return any(id in versions for _, id, _, _ in template.made) or any(id in versions for _, id in template.mutates)

    def _writes_known(self, template: Template, args: tuple) -> bool:
        """Whether the op writes into memory that is on the tape although the plan expects other memory."""
        targets = [t for i in template.writes if i < len(args) for t in tensors_in(args[i])]
        return any(not is_plain(t) or storage_id(t) in self.of_storage for t in targets)

    def _repeat(self, template: Template, args: tuple, kwargs: dict | None, values: Any, startable: bool) -> Any:
        """Run the op and record only what differs from step to step: its storages, and the state of the generator."""
        cursor, of_storage, holds = self.cursor, self.of_storage, self.program.holds
        sized_by_data = self.program.sized_by_data
        call = template.call
        if template.random:
            assert call is not None
            call = self.drawn(call, device_of_call((t.device for t in values if isinstance(t, torch.Tensor)), kwargs or {}))
        for i, _ in template.mutates:
            self.overwrites(values[i])
        out = template.func._op(*args, **kwargs) if kwargs else template.func._op(*args)
        if template.made:
            outs = (out,) if type(out) is torch.Tensor else tensors_in(out)
            origin = _EMPTY if template.empty else _RECORDED
            reachable = startable and call is not None and not template.empty
            for index, id, nbytes, again in template.made:
                if template.kwargs is None and not (index < len(outs) and is_plain(outs[index])):
                    self.another_result()
                    continue
                t = outs[index]
                version: Version = StorageVersion(id, t, self.tape, origin)
                address = storage_id(t)
                if (version.nbytes != nbytes and id not in sized_by_data) or address in of_storage:
                    self.unforeseen(t, id)
                    continue
                of_storage[address] = self.tape.versions[id] = version
                version.index = index
                version.call = call if again else None
                version.why = template.why
                holding = version.holding
                holding.tensor = id
                holding.reachable = reachable and again
                if id in holds:
                    self.holdings.hold(version, t)
        for t in tensors_in(out) if template.unshared else ():
            known = of_storage.get(storage_id(t))
            if known is not None:
                known.counter = UNSHARED
        for i, id in template.mutates:
            self.overwritten(values[i], call, startable, id)
        cursor.advance()
        return out

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
        self.templates = templates.none() if self.elsewhere else templates.by_op

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

    # -- called by the native engine, or here without it ---------------------------------------------

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
        if place is not None and self.placing.reads_as_planned(record, place):
            self.templates[place.position] = self._template(record, place.position)

    def _template(self, record: OpRecord, j: int) -> Template | OpOverload | None:
        if self.program.passes(j):
            return in_passing(record)
        if j in self.program.schedule.rebuilt:
            return template_of(record, self.tape.versions)
        return start_of(record, self.program.tracked)
