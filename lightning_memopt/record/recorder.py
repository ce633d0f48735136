"""The recorder: a dispatch mode below autograd that notes every op, what it read and which storage version it wrote.

It decides nothing. It tells its `Owner` and its `Observer` (record/protocols.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from lightning_memopt.device.places import device_of_call, generator_of_call
from lightning_memopt.record.arguments import captured, fresh, read
from lightning_memopt.record.modes import Outside
from lightning_memopt.record.protocols import Observer, OpRecord, Owner, Tiles
from lightning_memopt.record.rules import KNOWN, blocking, may_run_again, rule_of_call, written_by
from lightning_memopt.record.settings import numeric_flags
from lightning_memopt.record.tape import OUTSIDE, OVERWRITTEN, UNKNOWN, UNSHARED, Call, Origin, StorageVersion, Tape, recount
from lightning_memopt.record.tensors import (
    PLAIN,
    conjugating,
    count_versions,
    covers,
    is_foreign,
    is_plain,
    tensors_in,
)
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import HigherOrderOperator, OpOverload, storage_id

_ATEN = torch.ops.aten
_DETACH, _UNSAFE_VIEW, _EMPTY_STRIDED = _ATEN.detach.default, _ATEN._unsafe_view.default, _ATEN.empty_strided.default
_RECORDED, _EMPTY, _EXTERNAL = Origin.RECORDED, Origin.EMPTY, Origin.EXTERNAL


class Recorder(Outside):
    """Records one forward pass onto a tape. Enter it around the forward only; call `forget()` when the forward is over.

    Many methods: ops, saves, exposed memory and settings each reach it by their own, and a planned forward overrides some.
    """

    def __init__(self, tape: Tape, owner: Owner, observer: Observer | None = None) -> None:
        super().__init__()
        self.tape = tape
        self.owner = owner
        self.holdings = owner.holdings
        self.observer = observer
        self.writes: Callable[[torch.Tensor], None] | None = None  # called before an op writes memory, also later
        self.meets: Callable[[StorageVersion, torch.Tensor], None] | None = None  # called before an op reads a version
        self.runs: Callable[[OpOverload, tuple], OpOverload] | None = None  # the op to run for an op of backward
        self.ends: Callable[[], bool] | None = None  # called before an op: whether the forward has ended unseen
        self.tiles: Tiles | None = None
        self.capturing = True
        self.elsewhere = False
        self.fixed: frozenset[int] = frozenset()  # ops that never run again: what they read is overwritten before a rebuild
        self.hidden: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Context around allocations that are made only for rebuilds: the user's step would not make them."""
        self.op = 0
        self.next_id = 0
        self.of_storage: dict[int, StorageVersion] = {} if tape.native is None else tape.native.Versions()
        self._earlier: dict[int, StorageVersion] = {}
        """What earlier calls of the model, and code between them, made: storage -> version, as in `of_storage`."""
        self._beneath: dict[int, list[StorageVersion]] = {}
        """Id of a version -> earlier versions of its memory that changed unseen and of which bytes are held."""
        self._resizes: StorageVersion | None = None
        self.thread = threading.get_ident()

    def forget(self) -> None:
        """Drop the map from storages to versions: it must not outlive the forward pass."""
        self.of_storage.clear()
        self._earlier.clear()
        self._beneath.clear()

    def goes_on(self, written_over: Collection[int] = ()) -> dict[int, StorageVersion]:
        """Another call of the model begins in this forward. Code that ran since the last call is not on the tape, and may have
        written to results of earlier calls. So everything that was made before comes from outside of the new call. Returns
        it, by storage. `written_over`: storages that were overwritten after earlier calls read them.
        """
        versions = self.tape.versions
        made = {
            weak: v
            for weak, v in self.of_storage.items()
            if not v.external or weak in written_over or versions.get(v.id) is not v
        }
        for weak in made:
            del self.of_storage[weak]
        self._earlier |= made
        self.settings_changed()
        return made

    def recognise(self, version: StorageVersion, value: torch.Tensor | None) -> None:
        """The bytes of a version were rebuilt, perhaps in a new storage. `value` is a tensor on them. From now on, ops that
        read that storage read the version.
        """
        if value is None:
            return
        known = self.of_storage.get(storage_id(value))
        if known is version or (known is not None and version.stale):
            return
        self.tape.weak(value.untyped_storage())  # keeps the address from being used again
        self.of_storage[storage_id(value)] = version
        if version.alive() is None:  # else ops may still read the old storage
            version.counter = value._version

    def adopt(self, t: torch.Tensor, why: str = OUTSIDE) -> StorageVersion:
        """The version of a tensor that no recorded op made. It is held and never dropped (R4)."""
        known = self.of_storage.get(storage_id(t))
        if known is None and not self.capturing and (known := self._earlier.pop(storage_id(t), None)) is not None:
            self.of_storage[known.weak] = known
        if known is not None:
            return known
        version = self._new(t, Origin.EXTERNAL)
        version.why = why
        base = t._base
        version.parameter = isinstance(t, torch.nn.Parameter) or (base is not None and isinstance(base, torch.nn.Parameter))
        # R4: ops that read it never run again. Weights are exempt: whoever made their memory, nobody writes to them unseen.
        version.exposed = not version.parameter and is_foreign(t)
        self.holdings.met(version)
        if self._starts():
            self.holdings.read(version, t)
        return version

    def _starts(self) -> bool:
        """Whether rebuilds may start from what is read now."""
        return self.capturing

    def _current(self, version: StorageVersion, t: torch.Tensor) -> StorageVersion:
        """The version, or a new one if its counter moved unseen (by a compiled region, another thread or an extension)."""
        written_since = version.counter_in_op is not None and t._version > version.counter_in_op + 1
        if version.counter == UNKNOWN and not written_since:
            version.counter = t._version
            self.holdings.recounted(version, t)
        elif version.counter != t._version and version.counter != UNSHARED and self.capturing:
            return self._changed(version, t)
        return version

    def _changed(self, version: StorageVersion, t: torch.Tensor) -> StorageVersion:
        """The version that is read through `t`, whose counter is not the one that the version had."""
        return self._replaced(version, t, "changed by what the recorder does not see")

    def _replaced(self, old: StorageVersion, t: torch.Tensor, why: str) -> StorageVersion:
        """A new version of the storage of `old`, because its bytes are no longer what was recorded."""
        del self.of_storage[storage_id(t)]
        new = self.adopt(t, why)
        new.exposed, new.parameter = old.exposed, old.parameter
        old.next = new.id
        earlier = self._beneath.pop(old.id, [])
        self._beneath[new.id] = [*earlier, old] if self.holdings.replaced(old, new, t) else earlier
        return new

    def packs(self, t: torch.Tensor) -> StorageVersion | None:
        """The version of a tensor that autograd saves; None if it is not recorded, or its bytes changed unseen."""
        if type(t) not in PLAIN or t.layout is not torch.strided:  # other tensors that are not plain have no version
            return None
        version = self.of_storage.get(storage_id(t))
        if version is None or (version.counter != t._version and version is not self._current(version, t)):
            return None
        return version

    def _new(self, t: torch.Tensor, origin: Origin = Origin.RECORDED, id: int | None = None) -> StorageVersion:
        if id is None:
            id = self.next_id
            self.next_id += 1
        tape, native = self.tape, self.tape.native
        version: StorageVersion
        if native is None:
            version = tape.version(id, t, origin)
        else:  # without the call of `Tape.version`: this runs for each result of each op
            version = native.version(id, t, origin)
        self.of_storage[version.weak] = version  # the weak reference is the storage's address
        if self.capturing:
            tape.versions[id] = version
        return version

    def version_of(self, t: torch.Tensor) -> StorageVersion:
        """The version that an op is about to read through `t`."""
        version = self.of_storage.get(storage_id(t))
        if version is None:
            version = self.adopt(t)
        else:
            if version.origin is _EXTERNAL and self._starts():
                self.holdings.read(version, t)
            if version.counter != t._version:
                version = self._current(version, t)
        if self.meets is not None:
            self.meets(version, t)
        return version

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, func: OpOverload | HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """Run the op, note it, tell owner and observer."""
        if not isinstance(func, OpOverload):  # R9: `cond`, `scan`, as compiled modules
            return func(*args, **kwargs)
        capturing = self.capturing and (self.ends is None or not self.ends())
        observer = self.observer
        if func is _DETACH:
            return self._detach(*args)
        if self.runs is not None and not capturing:
            func = self.runs(func, args)
        rule = KNOWN.get(id(func))
        if rule is None or rule.handling == "random":
            rule = rule_of_call(func, args, kwargs)
        run = conjugating(func) if rule.conjugates else func._op
        if not capturing and (observer is None or (observer.passes is not None and observer.passes())):
            return run(*args, **kwargs)
        if func is _UNSAFE_VIEW and storage_id(args[0]) not in self.of_storage:
            return run(*args)  # AOT autograd adds it to results of generated code; the user may drop them unread
        if observer is None:
            op = self._number()
        else:  # the op's id in the graph, which also counts ops that no recorder sees, and leaves out ops that raised
            op = len(observer.ops)
            self.op = op + 1
        native = self.tape.native
        reads: list[StorageVersion] = []
        fields: tuple[Any, ...] = func, rule, (), {}, (), [], [], None, False
        record = OpRecord(*fields) if native is None else native.row(OpRecord, *fields)
        targets = written_by(func, rule, args, kwargs) if rule.writes else []
        if rule.counted_first and capturing:
            recount(targets, self.of_storage)
        if capturing:
            self._capture_all(op, record, args, kwargs, reads, targets)
        else:
            values = (*args, *kwargs.values()) if kwargs else args
            if native is None or self.meets is not None or native.captured(values, self.of_storage, False, reads) is None:
                read(values, self, reads)
        record.reads = tuple(dict.fromkeys(reads)) if len(reads) > 1 else tuple(reads)
        for t in targets if capturing else ():
            if self.tiles is None or not self.tiles.knows(t):  # no rebuild starts from what is made in tiles
                self._overwrites(self.of_storage[storage_id(t)])
        if self.writes is not None:
            for t in targets:
                self.writes(t)
        each = bool(targets) and func._name.startswith("aten::_foreach_")
        before = [(storage_id(t), t._version) for t in targets] if each or (targets and capturing) else []
        if observer is not None:
            observer.begin(func)
        while True:
            try:
                out = run(*args, **kwargs)
                break
            except torch.OutOfMemoryError:  # below the budget, too, if no free block is large enough
                # only an op that writes nothing and draws no random numbers: its first run has changed nothing
                if rule.writes or rule.handling not in ("pure", "empty") or not self.owner.gives_way():
                    raise
                if observer is not None:
                    observer.again()
        if observer is not None:
            observer.ran()
        if each:
            count_versions(targets, [v for _, v in before])
        if rule.handling == "empty" and capturing and isinstance(out, torch.Tensor) and is_plain(out):
            # it reads no bytes: a rebuild needs only the sizes and strides of the result, not the tensor that it is like
            like = {"dtype": out.dtype, "device": out.device}
            record.call = self.tape.call(op, _EMPTY_STRIDED, (out.size(), out.stride()), like, (), False)
            record.recomputable = True
        if self.tiles is not None and self.tiles.took:
            record.call, record.recomputable = None, False
        new = fresh(out, self) if native is None else native.fresh(out, self.of_storage)
        if new or rule.unshared:
            record.made = self._outputs(out, new, record)
        if targets and capturing:
            targets = [t for t, (id, _) in zip(targets, before, strict=True) if storage_id(t) == id]  # `set_` writes no bytes
            mutates = self._mutated(targets, record, reads)
            if rule.rewrite is None:  # else it writes running statistics, which no rebuild writes or reads
                record.mutates = mutates
        if observer is not None:
            observer.end(record, args, kwargs, out)
        if capturing:
            self._recorded(record)
        return out

    def _capture_all(
        self, op: int, record: OpRecord, args: tuple, kwargs: dict, reads: list[StorageVersion], targets: list[torch.Tensor]
    ) -> None:
        """Note the arguments of an op, and make its call if it may run again."""
        func, rule, foreign = record.func, record.rule, list[torch.Tensor]()
        record.args = captured(args, self, reads, foreign)
        if kwargs:
            record.kwargs = dict(zip(kwargs, captured(tuple(kwargs.values()), self, reads, foreign), strict=True))
        if foreign or self.elsewhere or rule.handling == "opaque":
            return
        if rule.rewrite is not None:  # calls read no running statistics
            statistics = {id(self.of_storage[storage_id(t)]) for t in targets}
            reads[:] = [version for version in reads if id(version) not in statistics]
        if op in self.fixed or not may_run_again(func, device_of_call((v.device for v in reads), kwargs).type):
            return
        if rule.handling != "empty":
            record.call = self._call(op, record, args, kwargs, reads, targets)
        record.recomputable = record.call is not None or rule.handling == "empty"

    def _number(self) -> int:
        """The number of the call that is being recorded. It rises."""
        self.op += 1
        return self.op - 1

    def _recorded(self, record: OpRecord) -> None:
        self.owner.recorded(record)

    def _detach(self, t: torch.Tensor) -> torch.Tensor:
        """Alias `t`. Not recorded as an op: torch calls it on a factory's result, but only if somebody else holds that."""
        out: torch.Tensor = _DETACH._op(t)
        version = self.of_storage.get(storage_id(t)) if self.capturing and is_plain(t) else None
        if version is not None and version.call is None and not version.external:
            self.holdings.recounted(version, out)  # `out` has its own version counter, which is also that of the user's tensor
        return out

    def _call(
        self, op: int, record: OpRecord, args: tuple, kwargs: dict, reads: list[StorageVersion], targets: list[torch.Tensor]
    ) -> Call | None:
        """The call that runs this op again; None if its results cannot be rebuilt."""
        func, rule, held_args, held_kwargs = record.func, record.rule, record.args, record.kwargs
        if rule.rewrite is not None and targets:
            # the op writes running statistics, but no output depends on them: a rebuild leaves them out
            func, held_args, held_kwargs = rule.rewrite(func, held_args, held_kwargs)
            targets = []
        mutated = {id(self.of_storage[storage_id(t)]) for t in targets}
        for version in reads:
            if version.exposed:
                return None  # R4: its content may have changed when a rebuild reads it
            if version.origin is _EMPTY:
                # R4: the result of `empty` has no content, unless this op overwrites all of it
                whole = rule.whole and id(version) in mutated and len(targets) == 1 and covers(targets[0])
                if not whole:
                    return None
            elif version.call is None and id(version) in mutated:
                return None  # no call made this memory, so its new content cannot be rebuilt, either
            else:
                version.read = True
        ids = tuple(dict.fromkeys([version.id for version in reads]))
        call = self.tape.call(op, func, *blocking(func, held_args, held_kwargs), ids, torch.is_grad_enabled())
        if rule.handling == "random":
            call.repeats = self.owner.wants_state(record.func._name)
            if call.repeats:
                generator = generator_of_call(args, kwargs, (version.device for version in reads))
                if generator is None:
                    return None
                with self.hidden():
                    call.rng = (generator, generator.get_state())
        return call

    def _mutated(
        self, targets: list[torch.Tensor], record: OpRecord, reads: list[StorageVersion]
    ) -> list[tuple[StorageVersion, StorageVersion, torch.Tensor]]:
        rule, call = record.rule, record.call
        reachable = self.holdings.can_run(call, reads)
        if rule.rewrite is not None:
            call = None  # the form that runs again writes nothing
        mutates = []
        for t in targets:
            old = self.of_storage.get(storage_id(t))
            if old is not None:
                new = self._overwritten(old, t, call, reachable)
                new.why = new.why or rule.why
                new.counter_in_op = t._version - rule.counted_first  # autograd does not move it twice
                if call is not None:
                    call.mutates = (*call.mutates, (old.id, new.id))
                mutates.append((old, new, t))
        return mutates

    def _overwrites(self, old: StorageVersion) -> None:
        """The bytes of a version are about to change."""
        for earlier in self._beneath.pop(old.id, ()):  # they may be the same bytes under another counter (that of `.data`)
            if earlier.counter < 0 or self.holdings.unchanged(earlier):
                self._overwrites(earlier)
        self.holdings.overwrites(old)

    def _overwritten(
        self, old: StorageVersion, t: torch.Tensor, call: Call | None, reachable: bool, id: int | None = None
    ) -> StorageVersion:
        """The version that an op has just written over `old`, through `t`. Its id is `id`, or the next free one."""
        new = self._new(t, Origin.EXTERNAL if call is None and old.external else Origin.RECORDED, id)
        new.counter = UNSHARED if old.counter == UNSHARED else UNKNOWN  # autograd increments the counter after the op
        new.counter_in_op = t._version
        old.next = new.id
        if call is None:
            new.exposed, new.parameter = old.exposed, old.parameter
            new.why = OVERWRITTEN
            if new.external and self._starts():
                self.holdings.read(new, t)
        else:
            new.call = call
        self.holdings.overwritten(old, new, t, reachable)
        return new

    def _outputs(
        self, out: Any, new: list[tuple[int, torch.Tensor]], record: OpRecord
    ) -> list[tuple[StorageVersion, torch.Tensor]]:
        """Versions for the new storages among the results. `new`: the results on new storages (`fresh`)."""
        rule, call = record.rule, record.call
        startable = call is not None and self.holdings.can_run(call, record.reads)
        origin = _EMPTY if rule.handling == "empty" else _RECORDED
        made = []
        for t in tensors_in(out) if rule.unshared else ():
            known = self.of_storage.get(storage_id(t)) if is_plain(t) else None
            if known is not None:
                known.counter = UNSHARED
        for index, t in new:
            if storage_id(t) in self.of_storage:
                continue  # an earlier result is on the same storage
            version = self._new(t, origin)
            version.index = index
            if call is not None and index < rule.makes:
                version.call = call
                call.made = (*call.made, (index, version.id))
            elif call is not None:
                version.why = "its kernel does not write all of it"
            else:
                version.why = rule.why or "made from bytes that cannot be rebuilt"
            self.holdings.made(version, startable and record.remakes(version))
            made.append((version, t))
        return made

    @property
    def _begun(self) -> bool:
        return self.op > 0

    def settings_changed(self) -> None:
        """R6: rebuilds run under the numeric settings that the forward began with. Results made under other settings are kept.

        The forward begins with its first op, because the recorded code may set a precision before that (Lightning's
        "bf16-true").
        """
        if not self._begun:
            self.tape.flags = numeric_flags()
        self.elsewhere = numeric_flags() != self.tape.flags

    def resizing(self, t: torch.Tensor) -> None:
        """The storage of `t` is about to be resized. Its bytes are lost, and may be restored unseen (R4)."""
        if self.writes is not None:
            self.writes(t)
        version = self._resizes = self.of_storage.get(storage_id(t))
        if version is not None and self.capturing:
            self.owner.resizes(version)
            self._overwrites(version)
            self._becomes_exposed(version, t, "its storage was resized")

    def filled(self, storage: int) -> None:
        """The storage with this id, of a tensor in tiles, has got its bytes."""
        version = self.of_storage.get(storage)
        if self.observer is not None and version is not None:
            self.observer.filled(version)

    def resized(self, t: torch.Tensor) -> None:
        """The storage of `t` has been resized."""
        old, self._resizes = self._resizes, None
        if old is None:
            return
        new = self.of_storage[storage_id(t)] if self.capturing else self._new(t, Origin.EXTERNAL)
        new.nbytes = t.untyped_storage().nbytes()
        if self.observer is not None:
            self.observer.resized(old, new)

    def expose(self, t: torch.Tensor, address: bool = False) -> None:
        """Somebody takes the raw memory of `t`: from now on it may change unseen, so no rebuild starts from it (R4).

        Only the `address` of a parameter may be taken without this: kernels take it to read the parameter, and copies of all
        parameters would cost the memory that rebuilds save.
        """
        if not self.capturing or not is_plain(t):
            return
        version = self.of_storage.get(storage_id(t)) or (self.adopt(t) if threading.get_ident() == self.thread else None)
        if version is None or version.exposed or (address and version.parameter):
            return
        self.holdings.overwrites(version)
        self._becomes_exposed(version, t, "its memory was handed out (data_ptr, numpy or dlpack)")

    def _becomes_exposed(self, version: StorageVersion, t: torch.Tensor, why: str) -> None:
        new = self._replaced(version, t, why)
        new.exposed = True
        new.counter = UNKNOWN
