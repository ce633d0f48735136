"""Recording a forward under a plan: every op is matched by position, overload, the tensors it reads and the sizes it makes.
What is not at its position, or reads other tensors, is looked for (runtime/rejoining.py).

Sizes that data decides on (the tokens of an expert) are free. What does not match (another branch, another shape, an extra
op) is kept: memory may grow, numbers cannot. Ops that meet their template are not recorded again (runtime/templates.py).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from lightning_memopt.graph import BEFORE
from lightning_memopt.record import UNKNOWN, Call, OpRecord, Recorder, Slot, storage_id, tensors_in, uncompiled
from lightning_memopt.record.tensors import PLAIN, detached, device_of, generator_of, is_plain
from lightning_memopt.runtime.rejoining import SPREAD, Made, Place, Places, number_of, starts_of
from lightning_memopt.runtime.templates import Template, flattened, in_passing, same_constant, start_of, template_of

if TYPE_CHECKING:
    from lightning_memopt.runtime.planned import PlannedEngine

_STRIDED = torch.strided


class Matcher(Recorder):
    """The recorder of a `PlannedEngine`."""

    def __init__(self, engine: PlannedEngine) -> None:
        super().__init__(engine.tape, engine)
        self.engine = engine
        self.program = engine.program
        self.templates = engine.program.templates.current()
        self.next_slot = len(engine.program.graph.tensors)  # ids below are the plan's own
        self._unread: list[tuple[Slot, weakref.ref[torch.Tensor]]] = []
        self._furthest = 0
        self._unknown = False
        self._given: tuple[tuple, dict] = (), {}
        self.places = Places(self.program, self.tape.slots)

    @uncompiled
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        engine = self.engine
        if engine.fence < engine.position:
            engine.pass_fences()
        template = self.templates[engine.position]
        if template is func and self.capturing and not engine.lost:
            engine.position += 1
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if type(template) is Template and template.func is func and self.capturing:
            values = flattened(args) if template.nested else args
            startable = self._startable(template, args, kwargs, values)
            if startable is not None:
                return self._repeat(template, args, kwargs, values, startable)
        self._unknown = True
        self._given = args, kwargs or {}
        try:
            return self.record(func, args, kwargs or {})
        finally:
            self._unknown = False
            self._given = (), {}

    def _starts(self) -> bool:
        """While it is not known which op of the plan runs, it may be one that rebuilds start from."""
        return self.capturing and (self._unknown or self.engine.position in self.program.schedule.replayed)

    # -- an op that is as it was ----------------------------------------------------------------------

    def _startable(self, template: Template, args: tuple, kwargs: dict | None, values: Any) -> bool | None:
        """Whether what the call reads is there or can be made again; None where it is not called as the template says."""
        engine = self.engine
        if torch.is_inference_mode_enabled() or (template.writes and self._writes_known(template, args)):
            return None
        if template.kwargs is None:
            known = all(storage_id(values[i]) in self.of_storage for i, _ in template.mutates)
            return False if known and not (engine.departures.first is not None and self._named(template)) else None
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
        of_storage, slots = self.of_storage, self.tape.slots
        if engine.departures.first is not None and self._named(template):
            return None
        startable = True
        reads = template.call is not None
        for i, view in template.tensors:
            t = values[i]
            if type(t) not in PLAIN or t.layout is not _STRIDED:
                return None
            slot = of_storage.get(storage_id(t))
            if slot is None:
                if not is_plain(t):
                    return None
                slot = self._enters(t, view.slot)
            elif slot.version != t._version and slot is not self._current(slot, t):
                return None
            if (slot.plan != view.slot and slots.get(view.slot) is not slot) or not view.same(t):
                return None
            if reads:
                if slot.exposed:
                    return None
                slot.read = True
                if slot.value is None and slot.external:
                    slot.value = detached(t)
                if not (slot.ok or slot.empty or slot.value is not None):
                    startable = False
        return startable

    def _named(self, template: Template) -> bool:
        """Whether tensors that the op makes are those of the plan already: it ran before, and its results keep their names."""
        slots = self.tape.slots
        return any(id in slots for _, id, _ in template.made) or any(id in slots for _, id in template.mutates)

    def _writes_known(self, template: Template, args: tuple) -> bool:
        """Whether the op writes, where the plan expects memory that it knows nothing of, into memory that is on the tape."""
        targets = [t for i in template.writes if i < len(args) for t in tensors_in(args[i])]
        return any(not is_plain(t) or storage_id(t) in self.of_storage for t in targets)

    def _enters(self, t: torch.Tensor, tensor: int) -> Slot:
        """The slot of what was made before the forward, met where the plan reads `tensor`."""
        slot = self.adopt(t)
        if self._may_be(slot, tensor):
            self._is(slot, tensor)
        return slot

    def _repeat(self, template: Template, args: tuple, kwargs: dict | None, values: Any, startable: bool) -> Any:
        """Run the op and note what is new about it: its storages, and the state of the generator."""
        engine, of_storage, holds = self.engine, self.of_storage, self.program.holds
        sized_by_data = self.program.sized_by_data
        call = template.call
        if template.random:
            assert call is not None
            call = self._with_state(call, values, kwargs)
        for i, _ in template.mutates:
            self._overwrites(of_storage[storage_id(values[i])])
        out = template.func._op(*args, **kwargs) if kwargs else template.func._op(*args)
        if template.made:
            outs = (out,) if type(out) is torch.Tensor else tensors_in(out)
            for index, id, nbytes in template.made:
                if template.kwargs is None and not (index < len(outs) and is_plain(outs[index])):
                    engine.passed(engine.position, "a result of another kind")
                    continue  # nothing was compared: it may return anything
                t = outs[index]
                slot = Slot(id, t, self.tape)
                address = storage_id(t)
                if (slot.nbytes != nbytes and id not in sized_by_data) or address in of_storage:
                    self._unforeseen(t)
                    continue
                of_storage[address] = self.tape.slots[id] = slot
                slot.plan = id
                slot.index = index
                slot.call = call
                slot.empty = template.empty
                slot.ok = startable and call is not None and not template.empty
                slot.why = template.why
                if id in holds:
                    engine.hold(slot, t)
        for i, id in template.mutates:
            t = values[i]
            old = of_storage[storage_id(t)]
            new = self._overwritten(old, t, self._new(t, id), call, startable)
            new.plan = id
            if id in holds:
                engine.hold(new, t)
        engine.position += 1
        return out

    def _overwrites(self, old: Slot) -> None:
        if old.away is not None:
            old.away.wait_gone()  # A2
            if old.away.exact:
                old.value = None  # else an alias of the memory that is about to change
        if old.external and old.plan is not None and not self._starts_from(old):
            old.value = None  # no rebuild starts from it: nothing to copy
        super()._overwrites(old)

    def _replaced(self, slot: Slot, t: torch.Tensor, why: str) -> Slot:
        if slot.away is not None and slot.plan is not None and not slot.away.gone:
            slot.away = None  # A2: it may have changed while it was copied
            self.engine.guard({slot.id})
        new = super()._replaced(slot, t, why)
        if new.asked:
            new.value, new.pinned = detached(t), True  # autograd reads what is in this memory, whatever that will be
        return new

    def expose(self, t: torch.Tensor, address: bool = False) -> None:
        slot = self.of_storage.get(storage_id(t)) if is_plain(t) else None
        if slot is not None and slot.away is not None:
            slot.away.wait_gone()  # A2: from now on it may change unseen
        super().expose(t, address)

    def _overwritten(self, old: Slot, t: torch.Tensor, new: Slot, call: Call | None, ok: bool) -> Slot:
        self._unread.append((new, weakref.ref(t)))
        super()._overwritten(old, t, new, call, ok)
        if new.pinned and not old.read:  # what is read in its place carries the bytes from here on
            old.value, old.pinned = None, False
        return new

    @property
    def _begun(self) -> bool:
        return self.op > 0 or self.engine.position > 0

    def settings_changed(self) -> None:
        super().settings_changed()
        templates = self.engine.program.templates
        self.templates = [None] * len(templates.found) if self.elsewhere else templates.found

    def settle(self) -> bool:
        """Before ops run unseen: read the counters that autograd has moved since. False where that is no longer possible."""
        unread, self._unread = self._unread, []
        for slot, ref in unread:
            if slot.version == UNKNOWN and not slot.stale and slot.alive() is not None:
                t = ref()
                if t is None:
                    self._unread = unread
                    return False
                self._current(slot, t)
        return True

    def _with_state(self, call: Call, values: Any, kwargs: dict | None) -> Call | None:
        """The call of this step: the generator's state is its own."""
        found = Call(call.op, call.func, call.args, call.kwargs, call.reads, call.grad)
        found.made, found.mutates = call.made, call.mutates
        device = device_of((t.device for t in values if isinstance(t, torch.Tensor)), kwargs or {})
        generator = generator_of(device)
        if generator is None:
            return None
        found.rng = (generator, generator.get_state())
        return found

    def _unforeseen(self, t: torch.Tensor) -> None:
        """A result that is not what the plan expects, although all that the op was given is."""
        if storage_id(t) not in self.of_storage:
            self._new(t).why = "its size changes from step to step"
        self.engine.passed(self.engine.position, "a result of another size")

    # -- an op that is recorded -----------------------------------------------------------------------

    def _number(self) -> int:
        self.op += 1
        self._furthest = max(self._furthest, self.engine.position)
        return (self._furthest << SPREAD) + self.op

    def _recorded(self, record: OpRecord) -> None:
        engine, program = self.engine, self.program
        j = engine.position
        made = [*record.made, *((new, t) for _, new, t in record.mutates)]
        place: Place | None = Place(j, ())
        at_its_turn = j < len(program.names) and record.func._name == program.names[j] and not engine.lost
        if not (at_its_turn and self._same(record.reads, made, j)):
            place = self.places.find(record, made, j) if not engine.unproven else None
            if place != Place(j, ()):
                engine.passed(j, record.func._name, aside=self._aside(record, place))
        if place is not None:
            for slot, tensor in zip(record.reads, program.inputs[place.position], strict=True):
                if self._may_be(slot, tensor):
                    self._is(slot, tensor)
            for slot, tensor in place.others:
                self._read_instead(slot, tensor, place.position)
            if place.others and record.startable:  # what it reads instead is held now
                for slot, _ in record.made:
                    slot.ok = record.remakes(slot)
        unheld = False
        for slot in (*record.reads, *(new for _, new, _ in record.mutates)):
            if slot.external and not slot.pinned and not self._starts_from(slot):
                slot.value, unheld = None, True  # held until it is known which op this is
        if place is not None:
            self._placed(record, made, place)
        elif unheld:
            for slot, _ in made:
                slot.ok = False  # its recipe reads what is not held

    def _aside(self, record: OpRecord, place: Place | None) -> bool:
        """Whether the op that is being recorded has to do with neither weights, nor gradients, nor memory of the plan that it
        would change, and leaves out only such ops: backward is what it is without it.
        """
        if place is not None:
            others = range(self.engine.position, place.position + bool(place.others))
            if not self.program.aside.issuperset(others):
                return False
        args, kwargs = self._given
        read = tensors_in([*args, *kwargs.values()])
        if any(t.requires_grad or (is_plain(t) and storage_id(t) in self.places.parameters) for t in read):
            return False
        return all(old.plan is None for old, _, _ in record.mutates)

    def _starts_from(self, slot: Slot) -> bool:
        """Whether rebuilds may start from what was made outside."""
        return slot.plan in self.program.starts or slot.id in self.engine.needed

    def _placed(self, record: OpRecord, made: Made, place: Place) -> None:
        """The op is the plan's: what it made are tensors of the plan."""
        engine, program, slots = self.engine, self.program, self.tape.slots
        j = place.position
        self._furthest = max(self._furthest, j)
        engine.position, engine.lost = j + 1, False
        for (slot, _), tensor in zip(made, program.outputs[j], strict=True):
            slot.plan = tensor
            slots[tensor] = slot
            engine.departures.excess_nbytes += max(0, slot.nbytes - program.graph.tensors[tensor].nbytes)
        if record.call is not None:
            record.call.op = number_of(j)
        if all(slot.plan == tensor for slot, tensor in zip(record.reads, program.inputs[j], strict=True)):
            self.templates[j] = self._template(record, j)
        again = j in program.schedule.replayed
        if not again:  # what it reads is let go: it cannot run again, as little as by its template
            for slot, _ in record.made:
                if not slot.empty:
                    slot.call, slot.ok = None, False
        for slot, t in made:
            if again and record.call is None and slot.plan is not None and not slot.empty:
                # it starts from what it did not when it was observed (another library's memory): its result stays
                engine.hold(slot, t)
                engine.guard({slot.id}, self._wanted_until([slot.plan]))
            elif slot.plan in program.holds:
                slot.call = slot.call if again else None
                engine.hold(slot, t)

    def _template(self, record: OpRecord, j: int) -> Template | OpOverload | None:
        if self.program.passes(j):
            return in_passing(record)
        if j in self.program.schedule.replayed:
            return template_of(record, self.tape.slots)
        return start_of(record, self.program.tracked)

    def _read_instead(self, slot: Slot, tensor: int, j: int) -> None:
        """The plan's op `j` read the slot where the plan has `tensor`. Where that was not made, the slot stands in for it.

        What a rebuild will need is seen to: it is held as the plan holds the tensor, or is within reach of what is held, which
        then stays; or, where it could not be made again, it is held for as long as the plan wants any of its tensors.
        """
        engine, program, slots = self.engine, self.program, self.tape.slots
        held, taken = False, tensor in slots
        if taken:
            wanted = j in program.schedule.replayed
        else:
            wanted, held = tensor in program.tracked, tensor in program.holds
            if slot.plan is None:
                self._is(slot, tensor)
            else:
                slots[tensor] = slot
                engine.stands.setdefault(slot.id, []).append(tensor)
        if not wanted:
            return
        starts = starts_of(slot, slots)
        lost = starts is None
        if starts is None:
            slot.call = None  # it starts from what was let go
            starts, held = {slot.id}, True
        if held and not slot.pinned:
            engine.hold(slot, self._argument(slot), tensor)
        names = [tensor, slot.plan, *engine.stands.get(slot.id, ())] if lost else [tensor]
        engine.guard(starts, None if taken else self._wanted_until(names))

    def _wanted_until(self, names: list[int | None]) -> int | None:
        """The last point at which the plan wants any of these tensors; None, for to the end, where it does not say."""
        made = [name for name in names if name is not None and name in self.program.graph.producers]
        return max(map(self.program.wanted_until, made)) if len(made) == len(names) else None

    def _argument(self, slot: Slot) -> torch.Tensor:
        """A tensor on the slot, among the arguments of the op that is being recorded."""
        args, kwargs = self._given
        return next(t for t in tensors_in([*args, *kwargs.values()]) if self.of_storage.get(storage_id(t)) is slot)

    def _same(self, reads: tuple[Slot, ...], made: Made, j: int) -> bool:
        """Whether this is the plan's op `j`. What was made before the forward is matched where it is first met."""
        inputs, outputs = self.program.inputs[j], self.program.outputs[j]
        slots = self.tape.slots
        if len(inputs) != len(reads) or len(outputs) != len(made) or not slots.keys().isdisjoint(outputs):
            return False
        if not all(self.program.fits(slot.nbytes, tensor) for (slot, _), tensor in zip(made, outputs, strict=True)):
            return False
        pairs = zip(reads, inputs, strict=True)
        return all(slots.get(tensor) is slot or self._may_be(slot, tensor) for slot, tensor in pairs)

    def _may_be(self, slot: Slot, tensor: int) -> bool:
        """Whether what was made before the forward may be the plan's tensor."""
        free = slot.plan is None and slot.external and tensor not in self.tape.slots
        return free and self.program.fits(slot.nbytes, tensor)

    def _is(self, slot: Slot, tensor: int) -> None:
        """What was made before the forward is the plan's tensor. Where ops of the plan that did not run make that, it stays for
        as long as rebuilds may start from it, however often the plan lets the tensor go: nothing makes this one again.
        """
        slot.plan = tensor
        self.tape.slots[tensor] = slot
        if tensor in self.program.starts and self.program.graph.tensors[tensor].born_at != BEFORE:
            self.engine.guard({slot.id}, self.program.wanted_until(tensor))
