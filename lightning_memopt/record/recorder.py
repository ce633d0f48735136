"""The recorder: a dispatch mode below autograd that notes every op, what it read and which storage version it wrote.

It decides nothing. An `Owner` is told of every new slot and of every tensor that autograd packs; an `Observer`, where there
is one, is told when each op begins and ends. Both are duck-typed seams (see the protocols).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.record.rules import Rule, is_simple, may_replay, rule_of, trains_statistics
from lightning_memopt.record.tape import UNKNOWN, UNSHARED, Call, Slot, Tape, View, storage_id

_DETACH = torch.ops.aten.detach.default
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default
_COUNTER = torch._C.DispatchKey.ADInplaceOrView
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NESTING = (list, tuple)
_NUMBERS = (int, float, bool)
_STRIDED = torch.strided
_PURE = Rule("pure")


class Observer(Protocol):
    """Who watches a step being recorded (the tracer)."""

    def begin(self, func: OpOverload) -> None: ...
    def ran(self) -> None: ...
    def end(
        self,
        func: OpOverload,
        args: tuple,
        kwargs: dict,
        out: Any,
        reads: tuple[Slot, ...],
        made: list[tuple[Slot, torch.Tensor]],
        mutates: list[tuple[Slot, Slot, torch.Tensor]],
        replayable: bool,
        rule: Rule,
    ) -> None: ...


class Owner(Protocol):
    """Who decides over the slots (the engine).

    `recorded`: an op ran, read these slots and made those (each with a tensor on it); sets `slot.value` to hold one.
    `overwrites`: the bytes of a slot that recorded ops have read, and that no recipe makes, are about to change.
    `wants_state`: whether to note the generator's state for the op that comes next.
    """

    def recorded(self, func: OpOverload, reads: tuple[Slot, ...], made: list[tuple[Slot, torch.Tensor]]) -> None: ...
    def overwrites(self, slot: Slot) -> None: ...
    def wants_state(self) -> bool: ...


def is_plain(t: torch.Tensor) -> bool:
    """An ordinary strided tensor with memory of its own: what can be recorded. Everything else is opaque (Rule 4)."""
    return (
        type(t) in _PLAIN
        and t.layout is torch.strided
        and not (t.is_quantized or t.is_nested or t.is_inference())
        and t.device.type != "meta"
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an op's result or argument: a tensor, or a list of tensors and None. No pytrees on the hot path."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


class Recorder(TorchDispatchMode):
    """Records one forward pass onto a tape. Enter it around the forward only; `forget()` when the forward is over."""

    def __init__(self, tape: Tape, owner: Owner, observer: Observer | None = None) -> None:
        super().__init__()
        self.tape = tape
        self.owner = owner
        self.observer = observer
        self.capturing = True
        self.op = 0
        self.next_slot = 0
        self.of_storage: dict[int, Slot] = {}
        self._addresses: list[int] = []
        self._simple: dict[int, bool] = {}
        self._atomics_are_fine = torch.are_deterministic_algorithms_enabled()
        self.thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Rule 9: compiled modules stay compiled

    def forget(self) -> None:
        """Drop the map from storages: it must not outlive the forward pass."""
        self.of_storage.clear()
        while self._addresses:
            torch.UntypedStorage._free_weak_ref(self._addresses.pop())

    def recognise(self, slot: Slot) -> None:
        """The slot's bytes were made again in a new storage: ops that read it read this slot."""
        if slot.value is not None:
            address: int = slot.value.untyped_storage()._weak_ref()  # type: ignore[assignment]
            self._addresses.append(address)  # keeps the address from being used again
            self.of_storage[storage_id(slot.value)] = slot

    def adopt(self, t: torch.Tensor, why: str = "made outside of the recorded forward") -> Slot:
        """The slot of a tensor that no recorded op made: it is held, never dropped (Rule 4)."""
        known = self.of_storage.get(storage_id(t))
        if known is not None:
            return known
        slot = self._new(t)
        slot.external = True
        slot.ok = True
        slot.version = t._version
        slot.why = why
        if self.capturing:
            slot.value = t if t.grad_fn is None else detached(t)
        return slot

    def _current(self, slot: Slot, t: torch.Tensor) -> Slot:
        """The slot, or a new one where its version counter moved unseen: a compiled region, another thread, an extension."""
        if slot.external and slot.value is None and self.capturing:
            slot.value = t if t.grad_fn is None else detached(t)
        if slot.version == UNKNOWN:
            slot.version = t._version
            if slot.value is not None:
                slot.value = t if t.grad_fn is None else detached(t)  # with the counter that was read
        elif slot.version != t._version and slot.version != UNSHARED and self.capturing:
            return self._replaced(slot, t, "changed by what the recorder does not see")
        return slot

    def _replaced(self, slot: Slot, t: torch.Tensor, why: str) -> Slot:
        """A new slot for the storage of `slot`, whose bytes are no longer what was recorded."""
        slot.value = None if slot.call is not None and slot.ok else slot.value
        del self.of_storage[storage_id(t)]
        slot.stale = True
        new = self.adopt(t, why)
        new.exposed = slot.exposed
        slot.next = new.id
        return new

    def packs(self, t: torch.Tensor) -> Slot | None:
        """The slot of a tensor that autograd saves; None where it is not recorded, or its bytes changed unseen."""
        slot = self.of_storage.get(storage_id(t))
        if slot is None or slot is not self._current(slot, t):
            return None
        return slot

    def _new(self, t: torch.Tensor) -> Slot:
        slot = Slot(self.next_slot, t)
        self.next_slot += 1
        self.of_storage[storage_id(t)] = slot
        if self.capturing:
            self.tape.slots[slot.id] = slot
        return slot

    def _capture(self, value: Any, reads: list[Slot], plain: list[bool]) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                plain[0] = False
                return None
            slot = self.of_storage.get(storage_id(value))
            slot = self.adopt(value) if slot is None else self._current(slot, value)
            reads.append(slot)
            return View(slot, value)
        if type(value) in (list, tuple):
            return [self._capture(v, reads, plain) for v in value]
        return value

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.capturing and not kwargs and self.observer is None:
            simple = self._simple.get(id(func))  # by identity: overloads are singletons, and hash in Python
            if simple is None:
                simple = self._simple[id(func)] = is_simple(func) and func is not _DETACH
            if simple:
                reads = self._simple_reads(args)
                if reads is not None:
                    return self._record_simple(func, args, reads)
        return self._record(func, args, kwargs or {})

    # -- the hot path: a pure op on tensors whose slots are known and unchanged ---------------------------

    def _simple_reads(self, args: tuple) -> tuple[Slot, ...] | None:
        """The slots of the tensors among `args`; None where anything about them is out of the ordinary."""
        slots = self.of_storage
        reads: list[Slot] = []
        for a in args:
            kind = type(a)
            if kind in _PLAIN:
                if a.layout is not _STRIDED:
                    return None
                slot = slots.get(storage_id(a))
                if slot is None or slot.version != a._version or slot.exposed or slot.empty:
                    return None
                if slot.on_accelerator and not self._atomics_are_fine:
                    return None
                if slot not in reads:
                    reads.append(slot)
            elif kind in _NESTING:
                if a and type(a[0]) not in _NUMBERS:
                    return None
            elif isinstance(a, torch.Tensor):
                return None
        return tuple(reads)

    def _record_simple(self, func: OpOverload, args: tuple, reads: tuple[Slot, ...]) -> Any:
        """Run and record. As it writes nothing, its arguments may be captured after it ran, and only if it made memory."""
        op = self.op
        self.op = op + 1
        out = func(*args)
        slots = self.of_storage
        if type(out) is not torch.Tensor or out.layout is not _STRIDED or out.is_inference():
            call = self._simple_call(op, func, args, reads)
            made = self._outputs(out, call, _PURE)
        elif storage_id(out) in slots:
            made = []
        else:
            call = self._simple_call(op, func, args, reads)
            slot = Slot(self.next_slot, out)
            self.next_slot = slot.id + 1
            slots[storage_id(out)] = self.tape.slots[slot.id] = slot
            slot.call = call
            slot.ok = True
            for s in reads:
                if not s.ok and s.value is None:
                    slot.ok = False
            call.made = ((0, slot.id),)
            made = [(slot, out)]
        self.owner.recorded(func, reads, made)
        return out

    def _simple_call(self, op: int, func: OpOverload, args: tuple, reads: tuple[Slot, ...]) -> Call:
        slots = self.of_storage
        held = []
        for a in args:
            if type(a) in _PLAIN:
                slot = slots[storage_id(a)]
                slot.read = True
                if slot.value is None and slot.external:
                    slot.value = a if a.grad_fn is None else detached(a)
                held.append(View(slot, a))
            else:
                held.append(a)
        return Call(op, func, held, {}, reads, torch.is_grad_enabled())

    # -- everything else --------------------------------------------------------------------------------

    def _record(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        observer = self.observer
        rule = rule_of(func)
        if not self.capturing and observer is None:
            return conjugating(func)(*args, **kwargs) if rule.conjugates else func(*args, **kwargs)
        if func is _DETACH:
            return self._detach(*args)
        op = self.op
        self.op = op + 1
        reads: list[Slot] = []
        plain = [True]
        held_args = [self._capture(a, reads, plain) for a in args]
        held_kwargs = {k: self._capture(v, reads, plain) for k, v in kwargs.items()} if kwargs else {}
        targets = self._targets(func, rule, args, kwargs)
        replayable = self.capturing and plain[0] and rule.handling != "opaque" and may_replay(func, _device(reads, kwargs))
        call = None
        if replayable and rule.handling != "empty":
            call = self._call(op, func, rule, args, kwargs, tuple(held_args), held_kwargs, reads, targets)
            replayable = call is not None
        if targets and self.capturing:
            for t in targets:
                old = self.of_storage[storage_id(t)]
                if old.call is not None and old.ok:
                    old.value = None  # an alias of the memory that is about to change: its recipe makes the bytes again
                elif old.read:
                    self.owner.overwrites(old)
        before = [(storage_id(t), t._version) for t in targets]
        run = conjugating(func) if rule.conjugates else func
        if observer is None:
            out = run(*args, **kwargs)
        else:
            observer.begin(func)
            out = run(*args, **kwargs)
            observer.ran()
        if targets and func._name.startswith("aten::_foreach_"):
            self._moved(targets, before)
        if rule.handling == "empty" and self.capturing and isinstance(out, torch.Tensor) and is_plain(out):
            # it reads no bytes: the replay needs the form of the result, not what the form was taken from
            like = {"dtype": out.dtype, "device": out.device}
            call = Call(op, _EMPTY_STRIDED, (out.size(), out.stride()), like, (), False)
            replayable = True
        made = self._outputs(out, call, rule)
        targets = [t for t, (id, _) in zip(targets, before, strict=True) if storage_id(t) == id]  # `set_` writes no bytes
        mutates = self._mutated(targets, call, rule) if self.capturing else []
        if rule.rewrite is not None:
            mutates = []  # running statistics: written once, by the user's own pass, and no replay reads them
        unique = tuple(dict.fromkeys(reads)) if call is None else call.reads
        if observer is not None:
            observer.end(func, args, kwargs, out, unique, made, mutates, replayable, rule)
        if self.capturing:
            self.owner.recorded(func, unique, [*made, *((slot, t) for _, slot, t in mutates)] if mutates else made)
        return out

    def _detach(self, t: torch.Tensor) -> torch.Tensor:
        """Not an op: the same bytes. torch calls it by itself on what a factory made, but only if somebody else holds that."""
        out = torch.ops.aten.detach.default(t)
        slot = self.of_storage.get(storage_id(t)) if self.capturing and is_plain(t) else None
        if slot is not None and slot.value is not None and slot.call is None and not slot.external:
            slot.value = detached(out)  # it has a version counter of its own: the one that the user's tensor has
        return out

    def _targets(self, func: OpOverload, rule: Rule, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        if not rule.writes or (rule.rewrite is not None and not trains_statistics(func, args, kwargs)):
            return []
        found: list[torch.Tensor] = []
        for where in rule.writes:
            value = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
            found.extend(t for t in _tensors(value) if is_plain(t))
        return found

    @staticmethod
    def _moved(targets: list[torch.Tensor], before: list[tuple[int, int]]) -> None:
        """Under a dispatch mode torch does not count the versions of what `_foreach_` ops overwrite."""
        torch.autograd.graph.increment_version([t for t, (_, v) in zip(targets, before, strict=True) if t._version == v])

    def _call(
        self,
        op: int,
        func: OpOverload,
        rule: Rule,
        args: tuple,
        kwargs: dict,
        held_args: tuple,
        held_kwargs: dict,
        reads: list[Slot],
        targets: list[torch.Tensor],
    ) -> Call | None:
        """The recipe of this op, or None where its results cannot be made again."""
        if rule.rewrite is not None and targets:
            # the running statistics are written, but no output depends on them: the replay leaves them out
            func, held_args, held_kwargs = rule.rewrite(func, held_args, held_kwargs)
            statistics = {id(self.of_storage[storage_id(t)]) for t in targets}
            reads = [slot for slot in reads if id(slot) not in statistics]
            targets = []
        mutated = {id(self.of_storage[storage_id(t)]) for t in targets}
        for slot in reads:
            if slot.exposed:
                return None  # Rule 4: what is in it when a replay would read it may be something else
            if slot.empty:
                # Rule 4: content of `empty` is nobody's, unless this op overwrites all of it
                whole = rule.whole and id(slot) in mutated and len(targets) == 1 and _covers(targets[0])
                if not whole:
                    return None
            elif slot.call is None and id(slot) in mutated:
                return None  # memory of somebody else: its new content is theirs
            else:
                slot.read = True
        call = Call(op, func, held_args, held_kwargs, tuple(dict.fromkeys(reads)), torch.is_grad_enabled())
        if rule.handling == "random":
            call.repeats = self.owner.wants_state()
            if call.repeats:
                generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
                call.rng = (generator, _state(generator, _device(reads, kwargs)))
        return call

    def _mutated(self, targets: list[torch.Tensor], call: Call | None, rule: Rule) -> list[tuple[Slot, Slot, torch.Tensor]]:
        found = []
        for t in targets:
            old = self.of_storage.get(storage_id(t))
            if old is None:
                continue
            new = self._new(t)
            new.version = UNSHARED if old.version == UNSHARED else UNKNOWN  # autograd moves the counter after the op
            old.stale = True
            old.next = new.id
            if rule.rewrite is not None or call is None:
                new.external = old.external
                new.exposed = old.exposed
                new.ok = old.external
                new.why = rule.why or "overwritten in place by an op that is not replayed"
                if old.external:
                    new.value = t if t.grad_fn is None else detached(t)
            else:
                new.ok = call.repeats and all(s.ok or s.value is not None or s.empty for s in call.reads)
                new.call = call
                call.mutates = (*call.mutates, (old, new.id))
            if (old.handles or old.pinned) and not new.ok:
                # autograd reads these bytes where the version counter of what it saved does not move
                new.value = detached(t)
                new.pinned = True
            found.append((old, new, t))
        return found

    def _outputs(self, out: Any, call: Call | None, rule: Rule) -> list[tuple[Slot, torch.Tensor]]:
        made = []
        for index, t in enumerate((out,) if isinstance(out, torch.Tensor) else _tensors(out)):
            if not is_plain(t):
                continue
            known = self.of_storage.get(storage_id(t))
            if known is not None:
                if rule.unshared:
                    known.version = UNSHARED
                continue
            slot = self._new(t)
            slot.index = index
            slot.empty = rule.handling == "empty"
            if call is not None:
                slot.ok = call.repeats and not slot.empty and all(s.ok or s.value is not None for s in call.reads)
                slot.call = call
                call.made = (*call.made, (index, slot.id))
            else:
                slot.why = rule.why or "made from what cannot be made again"
            made.append((slot, t))
        return made

    def expose(self, t: torch.Tensor) -> None:
        """Somebody takes the raw memory of `t`: from now on it may change unseen, so no replay starts from it (Rule 4).

        Parameters are exempt: kernels take their addresses in order to read, and a copy of each would cost what is saved.
        """
        if not self.capturing or not is_plain(t):
            return
        slot = self.of_storage.get(storage_id(t))
        if slot is None:
            if threading.get_ident() != self.thread:
                return
            slot = self.adopt(t)
        if slot.exposed or isinstance(slot.value, torch.nn.Parameter):
            return
        if slot.read and not (slot.call is not None and slot.ok):
            self.owner.overwrites(slot)
        new = self._replaced(slot, t, "its memory was handed out (data_ptr, numpy or dlpack)")
        new.exposed = True
        new.version = UNKNOWN


def detached(t: torch.Tensor) -> torch.Tensor:
    """An alias of `t` without its autograd history that shares its version counter; made below no dispatch mode."""
    # inside of a dispatch mode the key that shares the counter is off: without it the alias would count for itself
    with torch._C._DisableTorchDispatch(), torch._C._SetExcludeDispatchKeyGuard(_COUNTER, False):
        return t.detach()


def conjugating(func: OpOverload) -> Callable[..., Any]:
    """The op as outside of a dispatch mode: inside of one, conjugations that its kernel takes are ignored (pytorch#198118)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        off = torch._C._SetExcludeDispatchKeyGuard
        keys = torch._C.DispatchKey
        with off(keys.Conjugate, False), off(keys.Negative, False):
            return func(*args, **kwargs)

    return run


def _covers(t: torch.Tensor) -> bool:
    return t.numel() * t.element_size() == t.untyped_storage().nbytes() and t.is_contiguous()


def _device(reads: list[Slot], kwargs: dict) -> str:
    for slot in reads:
        if slot.device.type != "cpu":
            return slot.device.type
    device = kwargs.get("device")
    return torch.device(device).type if device is not None else "cpu"


def _state(generator: torch.Generator | None, device: str) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    if device == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state()


__all__ = ["UNKNOWN", "Observer", "Owner", "Recorder", "detached", "is_plain"]
