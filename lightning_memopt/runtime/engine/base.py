"""What both engines share: record the forward, give autograd handles, and give it the tensors in backward.

The pack hook returns a `Handle` on a storage version of the tape. For a tensor that the recorder does not know it returns
`Kept`, which has the tensor itself. When autograd asks for a version that has no value, recorded calls run again from values
that are held.

Two engines derive from `Engine`: `ObservingEngine` (observing.py) keeps all tensors, evicts some near the budget, and verifies
rebuilds; `PlannedEngine` (planned.py) carries out a plan.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from lightning_memopt.errors import ModifiedError
from lightning_memopt.record import OpRecord, Recorder, Tape, in_transform, uncompiled
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.interrupts import raise_deferred
from lightning_memopt.runtime.engine.handles import Handle, Kept, version_guard
from lightning_memopt.runtime.engine.holding import Holding, Holdings, Version, in_order, settle
from lightning_memopt.runtime.engine.naming import Names, modified, of_saved, of_start
from lightning_memopt.runtime.engine.rebuild import StartChangedError, rebuild
from lightning_memopt.torch_private import no_dispatch_modes


class Engine:
    """One recorded forward pass and its backward. It refers to the tape, and the handles of the tape refer to it.

    Many methods: the recorder calls it as its owner, and autograd's handles call it, too.

    tape: the record of the forward.
    holdings: decides what is held of the tape's versions.
    recorder: records the forward; None when the forward is over.
    lock: guards all of this (R11).
    saves: number of saves that were packed.
    rebuilt_ops: numbers of the calls that ran again, in the order in which they did.
    native: the native engine; None where Python does all.
    """

    def __init__(self, native: Any) -> None:
        raise_deferred()
        self.native = native
        self.tape: Tape[Holding] = Tape(Holding, native)
        self.holdings = Holdings()
        self.recorder: Recorder | None = None
        self.lock = threading.RLock()
        self.saves = 0
        self.rebuilt_ops: list[int] = []
        self._backward: object = None
        """The native engine's data for backward; None in the forward, and where Python does the whole backward."""

    @property
    def names(self) -> Names | None:
        """The names of tensors and lines for messages; None where there are none."""
        return None

    # -- while the forward is recorded -------------------------------------------------------------

    def make_recorder(self) -> Recorder:
        """The recorder of a forward under this engine."""
        return Recorder(self.tape, self)

    def begin_forward(self, recorder: Recorder) -> None:
        """The forward begins, and `recorder` records it."""
        self.recorder = recorder

    def end_forward(self) -> None:
        """The forward is over. May be repeated. R5: from now on, values that are held must not change."""
        if self.recorder is None:
            return
        self.recorder = None
        settle(self.tape.versions.values())

    def recorded(self, record: OpRecord) -> None:
        """An op ran (see `record.Owner`)."""
        raise NotImplementedError

    def gives_way(self) -> bool:
        """See `record.Owner`."""
        return False

    def wants_state(self, name: str) -> bool:
        """See `record.Owner`."""
        return True

    def resizes(self, version: Version) -> None:
        """See `record.Owner`. The next op that reads the storage reads another version."""

    def save_of(self, version: Version) -> int:
        """The number of the save that autograd is packing."""
        self.saves += 1
        return self.saves - 1

    def keeps(self, version: Version, t: torch.Tensor, save: int) -> bool:
        """Whether autograd keeps the tensor itself. `save`: the result of `save_of`."""
        raise NotImplementedError

    def pack(self, t: torch.Tensor) -> Kept | Handle:
        """The object that autograd holds instead of `t`, which it saves."""
        recorder = self.recorder
        version = recorder.packs(t) if recorder is not None and not in_transform() else None
        tiles = None if recorder is None else recorder.tiles
        if version is None or (tiles is not None and tiles.knows(t)):
            return Kept(t, self.about(version))
        save = self.save_of(version)
        if self.keeps(version, t, save):
            return Kept(t, self.about(version))
        return self.handle(t, save, version)

    def handle(self, t: torch.Tensor, save: int, version: Version) -> Handle:
        """The object that autograd holds instead of `t`, which is on the version."""
        if self.native is None:
            return Handle(self, save, version, self.tape.view(version.id, t), version_guard(t))
        made: Handle = self.native.handle(t, self, save, version)
        return made

    def about(self, version: Version | None) -> tuple[Names, int] | None:
        """(names, key of the tensor in them) of a tensor that autograd keeps itself; None where it has no name."""
        return None

    @staticmethod
    @uncompiled
    def unpack(packed: Any) -> Any:
        """The hook that autograd calls with an object that `pack` returned."""
        return packed.get()

    # -- in backward -------------------------------------------------------------------------------

    @uncompiled
    def unpacked(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle. May be called often, and on any thread (R11)."""
        try:
            return self.request(handle)
        except StartChangedError as error:
            raise self.start_changed(error.version) from None

    def request(self, handle: Handle) -> torch.Tensor:
        """Like `unpacked`, but raises StartChangedError, which names no tensor, where a start of a rebuild was changed."""
        with self.lock:
            raise_deferred()
            value = self.value_of(self.present(handle), handle)
            if handle.view.same(value):
                return value
            with no_dispatch_modes():  # a view needs no dispatch: the value has no history
                return handle.view.on(value)

    def value_of(self, version: Version, handle: Handle) -> torch.Tensor:
        """The value of a version for autograd."""
        holding = version.holding
        if holding.value is None and not self.reuse(version, handle):
            self.rebuild([version])
        value = holding.value
        assert value is not None
        in_order(holding)
        if not holding.intact:
            raise modified(self.called(handle), value._version, holding.expected)
        return value

    def present(self, handle: Handle) -> Version:
        """The version with the bytes that autograd would read without us. Raises ModifiedError where the version counter has
        moved, as autograd does.

        It is a later version than the handle's if the storage was overwritten and the counter did not move (a write through
        `.data`, or to raw memory).
        """
        if handle.now != handle.counter:
            raise modified(self.called(handle), handle.now, handle.counter)
        return self.latest(handle.version)

    def latest(self, version: Version) -> Version:
        """The last version of the same memory."""
        while version.next is not None:
            version = self.tape.versions[version.next]
        return version

    def called(self, handle: Handle) -> str:
        """The name, in messages, of the tensor of a handle."""
        return of_saved(handle.counted(), list(handle.view.size), handle.version, handle.save, self.names)

    @uncompiled
    def start_changed(self, version: Version) -> ModifiedError:
        """The error for a rebuild that would start from a version that was changed after the forward."""
        return of_start(version, self.names)

    def released(self, handle: Handle) -> None:
        """A node of autograd released a handle. Never raises: it runs inside a destructor."""
        with self.lock:
            if handle.version.holding.handles == 0:
                handle.version.holding.drop()

    def reuse(self, version: Version, handle: Handle) -> bool:
        """R7: if the user still has the storage, unchanged, hold it instead of a rebuild. Returns whether that was so.

        Only autograd gets these bytes, because it would read them without us, too. Rebuilds of other versions do not start
        from them.
        """
        storage = version.alive()
        if storage is None:
            return False
        with below_autograd():
            value = handle.counted().detach()  # it shares the version counter
            whole = torch.empty(0, dtype=value.dtype, device=value.device)
            value.data = whole.set_(storage, 0, (storage.nbytes() // whole.element_size(),), (1,))
        version.holding.rebuilt(value)
        return True

    def retains(self, version: Version) -> bool:
        """Whether a version that was rebuilt only to rebuild another one stays in memory after that."""
        return version.holding.handles > 0

    def rebuild(self, targets: list[Version]) -> None:
        """Give every target a value. Versions that are rebuilt on the way stay in memory if `retains` says so."""
        rebuild(self.tape, targets, self.retains, self.rebuilt_ops)
