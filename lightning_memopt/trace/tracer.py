"""Observe one real step, op by op, into a `Graph`.

The recorder tells the tracer when ops begin and end; the engine tells it what autograd packs, asks for and releases. A weak
reference on every new storage shows when it is freed. Before every op, storages that only the engine still holds are found by
their use counts (user_held.py). This shows how long *user code* held them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_on, on_host
from lightning_memopt.graph import BEFORE, OUTSIDE, UNRECORDED, Graph, Point
from lightning_memopt.graph.model import Kind, Phase
from lightning_memopt.native import Counter
from lightning_memopt.native.engine import hiding, maker
from lightning_memopt.record import OpRecord, Origin, Recorder, StorageVersion, fills, storage_id, uncompiled, written_by
from lightning_memopt.torch_private import OpOverload, storage_address, storage_of_weak
from lightning_memopt.trace.backwards import Backwards, backward_runs
from lightning_memopt.trace.building import graph_of
from lightning_memopt.trace.counted import Ledger
from lightning_memopt.trace.filled import Filled
from lightning_memopt.trace.flops import Flops
from lightning_memopt.trace.lines import user_line
from lightning_memopt.trace.lingering import Lingering
from lightning_memopt.trace.memory import OpMarks, TimedOps
from lightning_memopt.trace.seen import SeenOp, SeenSave, SeenTensor, Watch
from lightning_memopt.trace.user_held import ALONE, UserHeld

_UNSEEN = -1
"""Id of the memory that Python does not know. Versions have ids from 0."""
_LINGERS = "held by what is not recorded"
_new_point: Callable[[type[Point], tuple[str, int, int]], Point] = tuple.__new__  # takes a third of the time, for each op
_id_of = attrgetter("id")


class Tracer:
    """Builds the graph of one round: a recorded forward, its backward, and the update if there is one.

    Many methods: recorder, engine, allocator and session each tell it what they see, with one method per kind of event.

    phase, forward_over: set by the session. Backward begins with the first op of autograd, or its first unpack.
    live_nbytes: bytes of all storages known to be in memory.
    states_nbytes: bytes of the generator states of all random ops so far.
    counter: counts the allocator's bytes; None if there is no counter.
    uncounted_nbytes: bytes of known storages that the counter does not count (numpy's, shared memory).
    backward_ran: whether autograd ran an op after the forward, perhaps for another model (a GAN's discriminator).
    asked: whether autograd asked for a save of this forward.
    backwards: the backwards that asked.
    written: whether a later op wrote to a parameter, outside of any optimizer's step.
    generated: point at which unrecorded code ran -> its op. What the code made is known when a recorded op reads it.
    unreleased: number of saves of this forward that autograd has not released.
    passes: called before each op; returns whether the op is not noted (rest.py).
    """

    def __init__(self, device: torch.device, scope: Callable[[], str] = lambda: "") -> None:
        self.device = device
        self.scope = scope
        self.phase: Phase = "forward"
        self.forward_over = self.backward_ran = self.asked = self.written = False
        self.backwards = Backwards()
        self.generated: dict[int, int] = {}
        self.unreleased = 0
        self.passes: Callable[[], bool] | None = None
        self.largest_nbytes = self.live_nbytes = self.states_nbytes = 0
        self.points: list[Point] = []
        self.ops: list[SeenOp] = []
        self.tensors: dict[int, SeenTensor] = {}
        self.saves: dict[int, SeenSave] = {}
        self.lines: dict[int, str] = {}
        self.marks: OpMarks | None = None
        self._open: OpMarks | None = None
        self._began = 0.0
        self._alive: dict[int, Watch] = {}
        self._dies: Callable[[Watch], None] = self._death
        self._storages: dict[int, tuple[int, ...]] = {}
        self._adopted: dict[int, int] = {}
        self._user_held, self._flops = UserHeld(), Flops()
        self._filled = Filled(device, lambda: len(self.points) - 1)
        self._hidden, self._op, self._tensor = hiding(), maker(SeenOp), maker(SeenTensor)
        self._on_device: dict[torch.device, bool] = {}
        backend = backend_of(device)
        self._kind = backend.kind
        self._state_nbytes = backend.generator_state_nbytes()
        self.timed = TimedOps(backend) if backend.keeps_statistics else None
        self.ledger: Ledger | None = None
        self.counter: Counter | None = None
        self.uncounted_nbytes = 0
        self._uncounted: dict[int, int] = {}
        self._emptied: set[int] = set()
        self._made_before: dict[int, StorageVersion] = {}
        """Storage -> its version that was made before the present call of the model."""
        self._call = self._backward_at = 0
        self._lingering = Lingering()
        self._older: frozenset[int] = frozenset()

    # -- told by the recorder ----------------------------------------------------------------------

    def begin(self, func: OpOverload) -> None:
        held = self._user_held
        if held.together or held.lonely(held.alone, ALONE):
            self._are_released(held.released())
        if self._lingering.since:
            self._polls_lingering()
        if self.ledger is not None:
            self.ledger.note(len(self.points) - 1)
        if self.forward_over and not (self.backward_ran and self.phase != "forward") and backward_runs():
            self.backward_ran = True
            self.backward_begins()
        index = len(self.ops)
        self.points.append(self._hidden(_new_point(Point, ("op", index, 0))))
        if self.timed is not None:
            self.timed.begin(index)
        if self.marks is not None:
            self._open = self.marks
            self._open.begins(index)
        self._began = perf_counter()

    def again(self) -> None:
        # `begin` does not call this: that would be one more call for each op
        if self.timed is not None:
            self.timed.begin(len(self.ops))
        if self._open is not None:
            self._open.begins(len(self.ops))
        self._began = perf_counter()

    def ran(self) -> None:
        self._seconds = perf_counter() - self._began
        if self.timed is not None:
            self.timed.end()
        marks, self._open = self._open, None
        if marks is not None:
            marks.ends()

    def end(self, record: OpRecord, args: tuple, kwargs: dict, out: Any) -> None:
        func, rule, made, mutates, tensors = record.func, record.rule, record.made, record.mutates, self.tensors
        name, phase, now = func._name, self.phase, len(self.points) - 1
        forward = phase == "forward"
        scope = self.scope() if forward else ""
        if forward and record.recomputable:  # only these ops run again
            self.lines[len(self.ops)] = user_line()
        inputs = tuple(map(_id_of, record.reads))
        for tensor in inputs:
            if tensor not in tensors:
                inputs = tuple(dict.fromkeys(map(self._reads, record.reads)))
                break
        if phase == "backward" and rule.writes and not backward_runs() and self._writes_parameter(record, args, kwargs):
            self.written = True
        outputs: tuple[int, ...] = ()
        unrebuilt = outputs
        if made:
            outputs = tuple([version.id for version, _ in made])
            if made[-1][0].index >= rule.makes:
                unrebuilt = tuple([version.id for version, _ in made if version.index >= rule.makes])
            label = f"{scope}:{name}"
            for version, t in made:
                dtype, size = (_name_of(t.dtype), tuple(t.shape)) if fills(t) else ("", ())
                self._birth(version, label, now, dtype=dtype, size=size)
        written: tuple[tuple[int, int], ...] = ()
        if mutates:
            written = tuple([(old.id, new.id) for old, new, _ in mutates])
            outputs += tuple([id for _, id in written])
            for old, new, _ in mutates:
                self._overwritten(old, new, f"{scope}:{name}", now)
        flops = 0 if id(func) in self._flops.without else self._flops.of(func, args, kwargs, out)
        workspace = 0 if self.timed is None else self.timed.beyond_left_nbytes
        state_nbytes = self._state_nbytes if rule.handling == "random" else 0
        self.states_nbytes += state_nbytes
        heavy, recomputable = rule.heavy and flops > 0, record.recomputable and forward
        of_op = name, phase, inputs, outputs, written, self._seconds, workspace, flops, scope, heavy, recomputable, state_nbytes
        self.ops.append(self._op(*of_op, now, unrebuilt))
        if self.ledger is not None:
            self.ledger.ran(now)

    def _overwritten(self, old: StorageVersion, new: StorageVersion, name: str, now: int) -> None:
        before = self.tensors.get(old.id)
        if before is not None and before.freed_at is None:
            before.freed_at = now - 1
        self._user_held.forget((old.id,))
        dtype, size = (before.dtype, before.size) if before is not None else ("", ())
        self._birth(new, name, now, version_of=old, dtype=dtype, size=size)
        if before is not None and before.storage in self._alive and self.tensors[new.id].nbytes != before.nbytes:
            self._resized_by_op(before.storage, new, self.tensors[new.id].nbytes - before.nbytes)

    def _resized_by_op(self, key: int, version: StorageVersion, more_nbytes: int) -> None:
        """An op has resized the storage of a key (`resize_`, or `out=` if the result did not fit)."""
        storage = version.alive()
        self.live_nbytes += more_nbytes
        self.uncounted_nbytes -= self._uncounted.pop(key, 0)
        if self.ledger is not None:
            self.ledger.died(key)
        if storage is not None and self.counter is not None and (self.ledger is None or not self.ledger.born(key, storage)):
            self._count(key, storage)

    def _reads(self, version: StorageVersion) -> int:
        """The id of the tensor that an op reads in a version. Running statistics that backward reads are the adopted buffer."""
        if version.id not in self.tensors:
            if version.weak in self._adopted and self.phase != "forward":
                return self._storages[self._adopted[version.weak]][-1]
            self._meets(version)
        return version.id

    def _meets(self, version: StorageVersion) -> None:
        """An op reads a storage that no recorded op made and that was not adopted."""
        if version.weak in self._made_before:
            self._hands_over(self._made_before.pop(version.weak), version)
            return
        ledger, storage = self.ledger, version.alive()
        kind: Kind = "input" if self.phase == "forward" else "temporary"
        if ledger is None or storage is None:
            self.adopt(version, kind)
            if storage is not None:
                self._leaves_unseen(version, storage)
        elif not ledger.counter.counts(storage):  # numpy's: only those of the batch and the model are metered
            self.adopt(version, kind, has_bytes=False)
        elif ledger.is_older(storage):
            counted = ledger.is_counted(storage)  # else it is counted from now on: only C++ held it (a bucket of DDP)
            self.adopt(version, kind)
            if counted:
                ledger.identified(version.id)
        elif (made_at := ledger.taken(version.nbytes, self.generated)) is not None:
            self.ops[self.generated[made_at]].outputs += (version.id,)
            self._birth(version, "made by compiled code", made_at)
        elif self.generated and self.phase != "forward":  # the code freed other bytes when it made these
            ledger.end(version.nbytes, self.ops[-1].at - 1)
            self._made_late(version, kind)
        else:
            self.adopt(version, kind)
            ledger.identified(version.id, beyond_nbytes=ledger.open_nbytes)

    def forward_goes_on(self) -> None:
        """If a backward has begun, it is part of the forward, because its gradients have a graph."""
        for op in self.ops[self._backward_at :] if self.phase == "backward" else ():
            op.phase = "forward"
        self.phase, self.asked, self.backward_ran = "forward", False, False

    def call_begins(self, made: Mapping[int, StorageVersion]) -> None:
        """The last op marks the beginning of a call of the model. `made`: storage -> version, of what was made before it."""
        self.forward_over, self._call = False, len(self.ops) - 1
        self._made_before = {weak: version for weak, version in made.items() if version.id in self.tensors}

    def _hands_over(self, before: StorageVersion, version: StorageVersion) -> None:
        """An op of this call is the first to read `version`, whose memory was made before the call, as `before`."""
        call, t = self.ops[self._call], self.tensors[before.id]
        if t.freed_at is None:
            t.freed_at = call.at - 1
        self._user_held.handed_over(before, t.storage)
        call.outputs += (version.id,)
        self.tensors[version.id] = self._tensor(t.name, t.nbytes, "input", t.storage, call.at, None, t.dtype, t.size, (), None)
        self._storages[t.storage] += (version.id,)
        self._user_held.born(version, t.storage, watched=True)

    def _writes_parameter(self, record: OpRecord, args: tuple, kwargs: dict) -> bool:
        """Whether an op overwrites a parameter, as an update without an optimizer does (`p.data.add_`)."""
        versions = (self._adopted.get(storage_id(t)) for t in written_by(record.func, record.rule, args, kwargs))
        return any(id is not None and self.tensors[id].kind == "parameter" for id in versions)

    def adopt(self, version: StorageVersion, kind: Kind, name: str = "", has_bytes: bool = True) -> None:
        """Add a storage that was in memory before the recording began. `has_bytes`: whether a budget counts its bytes."""
        self._adopted.setdefault(version.weak, version.id)
        self._birth(version, name or kind, BEFORE, kind=kind, has_bytes=has_bytes)

    def resized(self, old: StorageVersion, new: StorageVersion) -> None:
        """The storage of `old` was resized, and `new` is the version of its bytes. Gathered weights have windows instead."""
        before = self.tensors.get(old.id)
        unknown = before is None and old.id not in self._emptied
        if unknown or old.parameter or (before is not None and before.kind == "parameter"):
            return
        if before is not None and before.storage in self._alive:
            ids = self._storages[before.storage]
            self.gone(before.storage)
            self._user_held.forget(ids)
            self._are_released(ids)
        if new.nbytes:
            self._made_late(new, "input" if self.phase == "forward" else "temporary")
        else:
            self._emptied.add(new.id)

    def filled(self, version: StorageVersion) -> None:
        """The storage of a version without bytes has got its bytes."""
        if self.ledger is None:  # else it shows them
            self._filled.add(version, self._kind)

    def _made_late(self, version: StorageVersion, kind: Kind) -> None:
        """Add a storage that no recorded op made, and that was made after the step began. In the forward it counts as from
        before the step, because planned forwards are compared by what ops make. Later, it is a result of the op before.
        """
        if self.phase == "forward" or not self.ops:
            self.adopt(version, kind)
            return
        self.ops[-1].outputs += (version.id,)
        self._birth(version, kind, self.ops[-1].at, kind=kind)

    def made_unseen(self, version: StorageVersion, name: str) -> None:
        """Add a gradient that the running hook of a sharded module has made, unless it is known."""
        if version.id not in self.tensors:
            self._birth(version, name, len(self.points), kind="gradient")

    def adopt_unseen(self, nbytes: int, addresses: frozenset[int]) -> None:
        """Add bytes on the device that belong to no tensor of this step: a library's workspace, another model. `addresses`: the
        addresses of all memory of the device that is in use.
        """
        nbytes, self._older = self._kind.allocated_nbytes(nbytes), addresses
        self.tensors[_UNSEEN] = SeenTensor(OUTSIDE, nbytes, "temporary", _UNSEEN, BEFORE)
        self.live_nbytes += nbytes

    def _leaves_unseen(self, version: StorageVersion, storage: torch.UntypedStorage) -> None:
        """Subtract a storage that was adopted only now from the bytes that belonged to no tensor (a bucket of DDP)."""
        unseen = self.tensors.get(_UNSEEN)
        if unseen is not None and storage_address(storage) in self._older:
            nbytes = min(unseen.nbytes, self.tensors[version.id].nbytes)
            unseen.nbytes -= nbytes
            self.live_nbytes -= nbytes

    def counts(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a storage as live until it is freed."""
        self.live_nbytes += self.tensors[key].nbytes
        if self.counter is not None and (self.ledger is None or not self.ledger.born(key, storage)):
            self._count(key, storage)
        watch = self._alive[key] = Watch(storage, self._dies)
        watch.key = key

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        """Add a storage to those that the counter does not count, if it does not."""
        if self.counter is not None and on_host(storage.device) and not self.counter.counts(storage):
            self._uncounted[key] = storage.nbytes()
            self.uncounted_nbytes += self._uncounted[key]

    def _birth(
        self,
        version: StorageVersion,
        name: str,
        at: int,
        kind: Kind | None = None,
        version_of: StorageVersion | None = None,
        dtype: str = "",
        size: tuple[int, ...] = (),
        has_bytes: bool = True,
    ) -> None:
        on_device = self._on_device.get(version.device)
        if on_device is None:
            on_device = self._on_device[version.device] = is_on(self.device, version.device)
        nbytes = 0
        if has_bytes and on_device:
            nbytes = version.nbytes if self._kind.block_nbytes == 1 else self._kind.allocated_nbytes(version.nbytes)
        storage = version.id
        if version_of is not None and version_of.id in self.tensors:
            before = self.tensors[version_of.id]
            storage = before.storage
            kind = kind or before.kind
        fields = name, nbytes, kind or _KIND[self.phase], storage, at, None, dtype, size, (), None
        self.tensors[version.id] = self._tensor(*fields)
        if storage == version.id:
            self._storages[storage] = (storage,)
        else:
            self._storages[storage] = (*self._storages[storage], version.id)
        if self.phase == "forward":  # what was there before the forward stays until its storage is freed
            self._user_held.born(version, storage, watched=version.origin is not _EXTERNAL)
        if version_of is None:
            if at >= 0 and nbytes > self.largest_nbytes:
                self.largest_nbytes = nbytes
            alive = storage_of_weak(version.weak)
            if alive is None:
                self.live_nbytes += nbytes
            elif has_bytes:
                self.counts(storage, alive)

    @uncompiled
    def _death(self, watch: Watch) -> None:
        self.gone(watch.key)
        ids = self._storages[watch.key]
        self._user_held.forget(ids)
        self._are_released(ids)

    def gone(self, storage: int) -> None:  # it no longer counts as live
        self._alive.pop(storage, None)
        self.uncounted_nbytes -= self._uncounted.pop(storage, 0)
        if self.ledger is not None:
            self.ledger.died(storage)
        self.live_nbytes -= self.tensors[self._storages[storage][-1]].nbytes

    def poll(self) -> None:
        """Find tensors that only the engine still holds, because user code has released them since the last op."""
        self._are_released(self._user_held.released())
        if self._lingering.since:
            self._polls_lingering()

    def _are_released(self, ids: Iterable[int]) -> None:
        now = len(self.points) - 1
        for id in ids:
            if self.tensors[id].freed_at is None:
                self.tensors[id].freed_at = now

    def _polls_lingering(self) -> None:
        self._lingering.poll(len(self.points) - 1, len(self.ops), self._is_held)

    def _is_held(self, version: StorageVersion) -> bool:
        return self._user_held.is_held(version, self.tensors[version.id].storage)

    # -- told by the engine ------------------------------------------------------------------------

    def packed(self, save: int, version: StorageVersion) -> None:
        self.saves[save] = self._hidden(SeenSave(version.id, len(self.ops), user_line()))
        self.unreleased += 1
        self._lingering.packed(version)

    def name_of(self, version: StorageVersion) -> str:
        return self.tensors[version.id].name if version.id in self.tensors else ""

    def line_of(self, save: int) -> str:
        return self.saves[save].line if save in self.saves else ""

    def reader_of(self, version: StorageVersion) -> tuple[str, str]:
        """(name, user's line) of the first op that reads a version."""
        index = next((i for i, op in enumerate(self.ops) if version.id in op.inputs), None)
        return ("", "") if index is None else (self.ops[index].name, self.lines.get(index, ""))

    def kept(self, where: int, t: torch.Tensor) -> tuple[str, str]:
        return (self.tensors[where].name, "") if where in self.tensors else ("", "")

    def unpacked(self, save: int) -> None:
        seen = self.saves.get(save)
        self.autograd_asked()
        if seen is not None:
            self.poll()
            seen.unpacked_at.append(len(self.points))
            self.points.append(self._hidden(Point("unpack", save, len(seen.unpacked_at) - 1)))

    def autograd_asked(self) -> None:
        """Autograd reads a save of this forward, kept or not: its backward has begun."""
        self.asked = self.asked or self.forward_over
        self.backwards.asks()
        self.backward_begins()

    def backward_begins(self) -> None:
        if self.forward_over and self.phase == "forward":
            self.phase, self._backward_at = "backward", len(self.ops)

    def released(self, save: int) -> None:
        seen = self.saves.get(save)
        if seen is not None and seen.released_at is None:
            if backward_runs():  # else the outputs of the forward were dropped: it has no backward
                self.autograd_asked()
            self.unreleased -= 1
            seen.released_at = len(self.points)
            t = self.tensors.get(seen.tensor)
            by_user = t is None or t.freed_at is None
            self._lingering.released(seen.tensor, len(self.points), len(self.ops), by_user)
            self.points.append(self._hidden(Point("release", save)))

    def close(self) -> None:
        """Stop observing. Drops the weak references, whose callbacks form a reference cycle with the tracer."""
        self._alive.clear()
        self._dies = lambda _: None
        self._user_held.clear()
        self._lingering.close()
        self._filled.close()
        if self.timed is not None:
            self.timed.close()

    # -- the result --------------------------------------------------------------------------------

    def graph(self, recorder: Recorder) -> Graph:
        """The graph of what was observed so far, with consecutive ids. Versions that no op used are left out."""
        self.poll()
        known = self.tensors | self._unrecorded()
        seconds = [op.seconds for op in self.ops] if self.timed is None else self.timed.seconds(len(self.ops))
        graph = graph_of(self.ops, known, self.saves, self.points, seconds, self.device.type, self.lines)
        return graph if self.timed is None else replace(graph, asked=self.timed.asked())

    def _unrecorded(self) -> dict[int, SeenTensor]:
        """Tensors for the bytes that unrecorded code allocated or held during the step."""
        first = max(self.tensors, default=0) + 1
        unseen = self.ledger.unseen() if self.ledger is not None else ()
        seen = [(OUTSIDE if u.born_at == BEFORE else UNRECORDED, u) for u in unseen]
        seen += [(_LINGERS, u) for u in self._lingering.seen()] + [(UNRECORDED, u) for u in self._filled.seen()]
        rest, make = ("", (), (), None), self._tensor
        return {
            i: make(name, u.nbytes, "temporary", i, u.born_at, u.freed_at, *rest) for i, (name, u) in enumerate(seen, first)
        }


_EXTERNAL = Origin.EXTERNAL
_name_of = cache(lambda dtype: str(dtype).removeprefix("torch."))
_KIND: dict[Phase, Kind] = {"forward": "activation", "backward": "gradient", "update": "temporary"}
