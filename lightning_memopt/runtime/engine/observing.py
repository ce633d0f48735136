"""The engine of observed steps: it keeps all tensors, until live bytes come near the budget.

Then it *evicts* saved tensors (eviction.py): it takes their checksums, drops them, and rebuilds them on demand. It verifies the
calls of the tensors that it keeps: in backward every call runs once more, and its result is compared, bit by bit, with the kept
value (R8).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from lightning_memopt.errors import ModifiedError, UnsupportedError
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import Call, OpRecord, Origin, storage_id
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.tensors import bytes_of
from lightning_memopt.runtime.engine.base import Engine
from lightning_memopt.runtime.engine.eviction import next_evicted
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.holding import Claim, Holdings, Version, rebuildable
from lightning_memopt.runtime.engine.naming import Names
from lightning_memopt.runtime.engine.rebuild import checksum, closure, compare, rebuild
from lightning_memopt.runtime.engine.starts import Starts
from lightning_memopt.runtime.engine.surplus import BEYOND_PLAIN, Bound, Pace, Surplus
from lightning_memopt.runtime.engine.units import Units

_EMPTY, _EXTERNAL = Origin.EMPTY, Origin.EXTERNAL
_NO_BOUND = 1 << 62
_STATE_NBYTES = 5056
"""Bytes of the state of a random generator on the CPU."""
_KNOWN = "aten::", "prims::"
"""Namespaces whose ops have tags that say whether they give the same bits again."""


class SaveEvents(Names, Protocol):
    """The part of the tracer that the engine uses: it is told of packs, unpacks and releases, and knows names."""

    def packed(self, save: int, version: Version) -> None: ...
    def unpacked(self, save: int) -> None: ...
    def released(self, save: int) -> None: ...
    def autograd_asked(self) -> None: ...


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors' storages hold the same bytes."""
    return torch.equal(bytes_of(a), bytes_of(b))


class _Told(Kept):
    """A tensor that autograd keeps itself. When autograd asks for it, a backward runs, and the tracer is told so."""

    __slots__ = ("_engine",)

    def __init__(self, t: torch.Tensor, about: tuple[Names, int] | None, engine: ObservingEngine) -> None:
        super().__init__(t, about)
        self._engine = weakref.ref(engine)  # weak: a tape lives as long as its handles, and this is not a handle

    def get(self) -> torch.Tensor:
        engine = self._engine()
        if engine is not None and engine.events is not None:
            engine.events.autograd_asked()
        return super().get()


class _Holdings(Holdings):
    """What is held of an observed forward. It makes copies only where there is room for them."""

    def __init__(self, engine: ObservingEngine) -> None:
        self._engine: ObservingEngine = weakref.proxy(engine)  # the engine holds this

    def copy(self, version: Version) -> None:
        """See `Holdings`. Without room for the copy, nothing will be rebuilt from these bytes."""
        engine = self._engine
        is_free = version.holding.handles == 0 and version.id not in engine.surplus.needed()
        if is_free and version.nbytes > engine.room(stay=True):
            engine.lose(version)
            return
        with engine.hidden():
            super().copy(version)
        engine.surplus.holds(version)

    def overwritten(self, old: Version, new: Version, t: torch.Tensor, reachable: bool) -> None:
        super().overwritten(old, new, t, reachable)
        if new.holding.claim is not Claim.NONE:
            self._engine.claimed(old, new, t)


class ObservingEngine(Engine):
    """Keeps tensors, evicts them near the limit, and verifies their calls.

    Many methods: the recorder, autograd and the session each tell it what happens.

    events: the tracer, or None.
    pressure: returns the bytes by which live memory exceeds the limit now; None: nothing is evicted.
    verify: whether each call runs a second time for comparison.
    bound: how many bytes the step may take; None: any number.
    surplus: what is held although a plain step would not hold it.
    verified: ids of versions that were compared.
    opaque_ops: op name -> reason, of ops that gave other bits when they ran again.
    starts: versions from which rebuilds may start after the forward.
    evictable: versions that may be evicted, by id.
    sums: checksums of evicted versions, by id.
    evictions: number of evictions.
    packs: whether autograd has saved a tensor.
    clock: number of ops so far.
    needed: after the step, ids of the versions needed to rebuild what autograd still holds; None before.
    written_over: storages of starts that were overwritten after the forward, or between two calls of it.
    rebuilt: versions that rebuilds made, by id. Dropped ones are removed when bytes are counted.
    on_rebuilt: called with each version that was rebuilt.
    exhausted: called where nothing is left to evict. Returns whether it has freed other memory.
    units: the units of a sharded model; None for other models.
    hidden: context around allocations for rebuilds. The tracer must not count these: the user's step would not make them.
    """

    def __init__(
        self,
        events: SaveEvents | None = None,
        pressure: Callable[[], int] | None = None,
        verify: bool = True,
        bound: Bound | None = None,
    ) -> None:
        super().__init__(loaded())
        self.bound = bound
        self.surplus = Surplus(self.tape)
        self.holdings: Holdings = _Holdings(self)
        self._states_nbytes = 0
        self._pace = Pace()
        self._unverified: set[str] = set()
        self._verified_ops: set[str] = set()
        self.events = events
        self.pressure = pressure
        self.verify = verify
        self.verified: set[int] = set()
        self.opaque_ops: dict[str, str] = {}
        self.starts = Starts(self.tape)
        self.evictable: dict[int, Version] = {}
        self.sums: dict[int, tuple[int, int]] = {}
        self.evictions = 0
        self.packs = False
        self.clock = 0
        self.needed: set[int] | None = None
        self.written_over: set[int] = set()
        self.rebuilt: dict[int, Version] = {}
        self.on_rebuilt: Callable[[Version], None] = lambda _: None
        self.exhausted: Callable[[], bool] = bool
        self.units: Units | None = None
        self.hidden: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._calls: dict[int, Call] = {}
        self._claimed_by: dict[int, Version] = {}  # id -> the earlier version of the same memory that autograd may claim
        self._room_nbytes = 0
        self._retained: dict[int, bool] = {}

    def recorded(self, record: OpRecord) -> None:
        self.clock = self.clock + 1 if record.call is None else record.call.op + 1  # calls have the ids of their ops
        if record.call is not None:
            self._calls[record.call.op] = record.call
            self.surplus.recorded(record.call)
        if self.units is not None:
            self.units.recorded(record)
        if self.opaque_ops and record.func.name() in self.opaque_ops:
            for version in (*(version for version, _ in record.made), *(new for _, new, _ in record.mutates)):
                self._becomes_opaque(version, record.func.name())
        for version in record.reads:
            if version.origin is _EXTERNAL and not version.parameter:
                self.surplus.holds(version)
        for version, t in record.made:
            self._starts_from(version, t)
        for _, version, t in record.mutates:
            self._starts_from(version, t)
        if self.pressure is not None:
            self.relieve()
        self.keep_to_bound()

    def _starts_from(self, version: Version, t: torch.Tensor) -> None:
        """R4: rebuilds may start from this version, which no call makes."""
        tiles = None if self.recorder is None else self.recorder.tiles
        if version.call is None and version.origin is not _EMPTY and (tiles is None or not tiles.knows(t)):
            version.holding.hold(t)
            version.holding.reachable = True
            self.surplus.holds(version)

    def room(self, stay: bool = False) -> int:
        """Bytes that this step may take in addition to those in memory, for a moment, or to `stay`."""
        return _NO_BOUND if self.bound is None else self.bound.room(self.surplus.nbytes().made, stay)

    def keep_to_bound(self) -> None:
        """If the engine alone holds more bytes than an observed step may take, let go of some."""
        bound = self.bound
        most_nbytes = self.surplus.most_nbytes + self._states_nbytes
        if bound is None or not most_nbytes:
            return
        plain_nbytes = bound.unrebuilt() - most_nbytes  # as `Bound.spare` does; this runs for every op
        if plain_nbytes > bound.plain_peak_nbytes:
            bound.plain_peak_nbytes = plain_nbytes
        if most_nbytes <= int(BEYOND_PLAIN * bound.plain_peak_nbytes):
            return
        if not self._pace.is_due(most_nbytes, len(self.tape.versions)):
            return
        nbytes, made_nbytes = self.surplus.nbytes()
        spare_nbytes = bound.spare(made_nbytes) - self._states_nbytes
        looks = nbytes > spare_nbytes
        if looks:
            nbytes = self._lose_down_to(spare_nbytes // 2, nbytes)  # room for more than one op
        above_nbytes = self.surplus.most_nbytes + self._states_nbytes + max(nbytes, spare_nbytes) // 8
        self._pace.counted(len(self.surplus), above_nbytes)
        if looks:
            self._pace.looked(nbytes <= spare_nbytes // 2, len(self.tape.versions))

    def _lose_down_to(self, few_nbytes: int, nbytes: int) -> int:
        """Let go of starts until at most `few_nbytes` of the surplus of `nbytes` are left, or no start may be let go of.
        Returns the bytes that are left.
        """
        for version in self.surplus.droppable(self.evictable if self.bound is not None and self.bound.is_tight else ()):
            self.lose(version)
            nbytes -= version.nbytes
            if nbytes <= few_nbytes:
                break
        return nbytes

    def lose(self, version: Version) -> None:
        """Let go of bytes from which rebuilds could start."""
        for lost in self.surplus.lose(version):
            self.evictable.pop(lost.id, None)

    def wants_state(self, name: str) -> bool:
        if self.bound is not None:
            nbytes, made_nbytes = self.surplus.nbytes()
            if nbytes + self._states_nbytes + _STATE_NBYTES > self.bound.spare(made_nbytes):
                return False
        self._states_nbytes += _STATE_NBYTES
        return True

    @property
    def unverified(self) -> set[str]:
        """Names of ops that have no tags to say whether they give the same bits again, and that could not be compared."""
        return self._unverified - self._verified_ops

    def meets(self, version: Version, t: torch.Tensor) -> None:
        """An op of a sharded model is about to read the version through `t`."""
        if self.units is not None and self.units.crosses(version, t):
            self.evictable.pop(version.id, None)

    def _becomes_opaque(self, version: Version, op: str) -> None:
        version.call, version.why = None, self.opaque_ops[op]
        version.holding.reachable = False

    def keeps(self, version: Version, t: torch.Tensor, save: int) -> bool:
        if version.external or version.stale:
            return True
        if version.holding.value is None:
            version.holding.hold(t)
        if rebuildable(version):
            self.evictable[version.id] = version
        return False

    def claimed(self, old: Version, new: Version, t: torch.Tensor) -> None:
        """Autograd saved `old` or an earlier version, and may read the bytes of `new`. So these stay, as in a plain step."""
        self._claimed_by[new.id] = old
        new.holding.hold(t)
        if rebuildable(new):
            self.evictable[new.id] = new

    def pack(self, t: torch.Tensor) -> Kept | Handle:
        packed = super().pack(t)
        self.packs = True
        if self.events is None:
            return packed
        if isinstance(packed, Kept):
            return _Told(t, packed.about, self)
        self.events.packed(packed.save, packed.version)
        return packed

    @property
    def names(self) -> Names | None:
        return self.events

    def about(self, version: Version | None) -> tuple[Names, int] | None:
        return None if version is None or self.events is None else (self.events, version.id)

    def rebuilt_nbytes(self) -> int:
        """Bytes in memory that rebuilds made. The tracer does not count them."""
        if not self.rebuilt:
            return 0
        self.rebuilt = {id: version for id, version in self.rebuilt.items() if version.holding.value is not None}
        return sum([version.nbytes for version in self.rebuilt.values()])

    # -- writes after the forward ------------------------------------------------------------------

    def end_forward(self) -> None:
        is_over = self.recorder is None
        super().end_forward()
        if not is_over:
            self.starts.note()
            self.keep_to_bound()

    def writes(self, t: torch.Tensor) -> None:
        """The memory of `t` is about to change, after the forward or between two calls of it: copy the versions from which
        rebuilds start.
        """
        recorder = self.recorder
        if recorder is not None and self.starts.has(recorder.of_storage.get(storage_id(t))):
            return  # a further call of the forward runs, and its recorder sees what it overwrites
        with self.lock:
            for version in self.starts.taken(t):
                if rebuildable(version):
                    version.holding.drop()  # its call rebuilds the bytes
                elif version.holding.value is not None:
                    self.holdings.copy(version)
                    self.rebuilt[version.id] = version
                    self.written_over.add(version.weak)
                if version.holding.handles > 0 and version.next is None:
                    self._reads_later(version, t)

    def resizes(self, version: Version) -> None:
        if version.holding.handles > 0 or not rebuildable(version):
            self.starts.lose(version)

    def _reads_later(self, version: Version, t: torch.Tensor) -> None:
        """Autograd saved the version and will read the new bytes. The counter of its save says whether that is an error."""
        later = self.tape.version(-1 - version.id, t)
        later.holding.hold(t)
        later.why = "written over after the forward"
        self.tape.versions[later.id] = later
        self._claimed_by[later.id] = version
        version.next = later.id

    # -- eviction ----------------------------------------------------------------------------------

    def relieve(self, spare: Version | None = None) -> None:
        """Evict, but not `spare`, until live memory is below the limit or no version is left to evict."""
        pressure = self.pressure
        if pressure is not None and self.evictable and pressure() > 0:
            self._evict_while(lambda: pressure() > 0, spare)

    def gives_way(self) -> bool:
        half_nbytes, before = self._evictable_nbytes() // 2, self.evictions
        self._evict_while(lambda: self._evictable_nbytes() > half_nbytes)
        return self.evictions > before or self.exhausted()

    def _evictable_nbytes(self) -> int:
        return sum(version.nbytes for version in self.evictable.values())

    def _evict_while(self, wanted: Callable[[], bool], spare: Version | None = None) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # not even for a checksum
            while self.evictable and wanted():
                candidates = [v for v in self.evictable.values() if v is not spare]
                version = next_evicted(candidates, self.clock, self.tape.versions)
                if version is None:
                    return
                if self.bound is not None and not self.surplus.gives_back(version, self.evictable):  # it would free nothing
                    self.evictable.pop(version.id)
                    continue
                self.evict(version)

    def evict(self, version: Version) -> None:
        """Take a checksum of a version and drop its bytes."""
        value = version.holding.value
        if value is not None and version.id not in self.sums:
            with below_autograd(), self.hidden():
                self.sums[version.id] = checksum(value)
        self.evictable.pop(version.id, None)
        if value is not None:
            version.holding.drop()
            self.evictions += 1

    # -- backward ----------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        with self.lock:
            version = self.present(handle)
            if self.events is not None:
                self.events.unpacked(handle.save)
            if version.holding.value is None and not self.reuse(version, handle):
                self.relieve()
                with self.hidden():
                    self.rebuild([version])
                    compare(version, self.sums.get(version.id))
                self.relieve(spare=version)
            elif self.verify and rebuildable(version) and version.id not in self.verified:
                try:
                    with self.hidden():
                        self._verify(version)
                except (ModifiedError, UnsupportedError):  # it cannot be rebuilt, but it is in memory, so there is no error
                    self.starts.changed_unseen()
                    self.evictable.clear()
            return super().request(handle)

    def rebuild(self, targets: list[Version]) -> None:
        first = len(self.rebuilt_ops)
        wanted_nbytes = sum(version.nbytes for version in targets)
        self._room_nbytes = 1 << 62 if self.pressure is None else -self.pressure() - wanted_nbytes
        self._retained.clear()
        while True:
            try:
                super().rebuild(targets)
                break
            except torch.OutOfMemoryError:  # below the limit, too, if what is left is in pieces
                if not self.gives_way():
                    raise
        wanted = {version.id for version in targets}
        calls = (self._calls[op] for op in set(self.rebuilt_ops[first:]))
        for id in sorted({id for call in calls for _, id in (*call.made, *call.mutates)}):
            version = self.tape.versions[id]
            if version.call is not None and version.holding.value is not None:
                self.rebuilt[version.id] = version
                self.on_rebuilt(version)
                if version.holding.handles > 0 and version.holding.reachable and version.id not in wanted:
                    self.evictable[version.id] = version

    def retains(self, version: Version) -> bool:
        """A version with handles stays while memory is below the limit, so that a long rebuild does not undo evictions."""
        if version.holding.handles == 0:
            return False
        stays = self._retained.get(version.id)
        if stays is None:
            stays = self._retained[version.id] = version.nbytes <= self._room_nbytes
            if stays:
                self._room_nbytes -= version.nbytes
        return stays

    def _verify(self, version: Version) -> None:
        """If there is room, rebuild a kept version and compare. A difference makes its op opaque."""
        holding, call = version.holding, version.call
        assert call is not None
        self.verified.add(version.id)
        if self._needed_nbytes(version) <= self.room():
            with contextlib.suppress(torch.OutOfMemoryError):  # what is left may be in pieces
                with holding.set_aside() as kept:
                    rebuild(self.tape, [version], lambda _: False, [])
                    assert holding.value is not None
                    with below_autograd():
                        if not same_bits(holding.value, kept):
                            self._distrust(version)
                self._verified_ops.add(call.func.name())
                return
        if not call.func.name().startswith(_KNOWN):
            self._unverified.add(call.func.name())

    def _needed_nbytes(self, version: Version) -> int:
        """Maximum number of bytes that a rebuild of a version takes at one moment, without the workspaces of its ops."""
        versions = self.tape.versions
        with version.holding.set_aside():
            calls = closure(versions, [version])
        last = {id: call.op for call in calls for id in call.reads} | {version.id: _NO_BOUND}
        made_nbytes = peak_nbytes = 0
        there: dict[int, int] = {}
        for call in calls:
            for id in {id for _, id in (*call.made, *call.mutates)}:
                there[id] = versions[id].nbytes
                made_nbytes += there[id]
            peak_nbytes = max(peak_nbytes, made_nbytes)
            for id in [id for id in there if last.get(id, call.op) <= call.op]:
                made_nbytes -= there.pop(id)
        return peak_nbytes

    def _distrust(self, version: Version) -> None:
        """The op of the version gave other bits. It is opaque from now on."""
        assert version.call is not None
        name = version.call.func.name()
        if name not in self.opaque_ops:
            warnings.warn(
                f"MemOpt: running {name} again gave other bits than the first time; its results are kept from now on. "
                "If the op is deterministic, please report it.",
                stacklevel=2,
            )
        self.opaque_ops[name] = "a rebuild gave other bits"
        version.holding.reachable = False
        self.evictable.pop(version.id, None)
        self.surplus.holds(version)

    def released(self, handle: Handle) -> None:
        with self.lock:
            version = handle.version
            self._let_go(version)
            latest = self.latest(version)
            if latest is not version:
                self._let_go(latest)
            if self.events is not None:
                self.events.released(handle.save)

    def _let_go(self, version: Version) -> None:
        """Let go of the bytes if autograd will not read them any more."""
        earlier: Version | None = version
        while earlier is not None:
            if earlier.holding.handles > 0:
                return
            earlier = self._claimed_by.get(earlier.id)
        self.evictable.pop(version.id, None)
        is_over = self.needed is not None and version.id not in self.needed and version.holding.claim is Claim.NONE
        if is_over or rebuildable(version):
            version.holding.drop()
        elif version.holding.value is not None:
            self.surplus.holds(version)
            self.keep_to_bound()
