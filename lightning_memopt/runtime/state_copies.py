"""The copies of optimizer state: each tensor of a parameter's state goes out to a tier, and comes back when it is read.

The tensors stay the user's own objects. Only their storages are emptied and filled again. A parameter's state is a dict
(`ParkedState`) whose tensors come back when they are read, whoever reads them: the update, `state_dict()`, a loop that logs a
norm. Copies may run while backward goes on.

S1. A storage is emptied only after its copy out has ended, and its copy is dropped only after the copy back has: whatever fails
    or is interrupted, one of the two has all bytes.
S2. A tensor is parked only if nobody but the optimizer holds it, its storage, or the dict that it is in.
S3. State that was written while its copy ran is copied again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import optim

from lightning_memopt.errors import OffloadError
from lightning_memopt.logs import Once
from lightning_memopt.record import fills, is_plain, uncompiled, unwatched
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.leaving import leaves
from lightning_memopt.record.tensors import bytes_of, in_shared_memory
from lightning_memopt.runtime.holders import ALONE, references, use_counts
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.state_dicts import ParkedState
from lightning_memopt.runtime.tiers import Stored
from lightning_memopt.runtime.tiers.shelf import unobserved
from lightning_memopt.runtime.tiers.streams import empty_storage, wait_on_host


class _Leaving(NamedTuple):
    """A tensor of a parameter's state that is being copied to the tier, and is on the device meanwhile.

    identity, version: which tensor it was, and of which version, when the copy began.
    stored: its copy.
    """

    state: ParkedState
    name: Any
    identity: int
    version: int
    stored: Stored


class StateCopies:
    """The state of one optimizer's parameters, out in a tier, on the device, or on its way. `ParkedStates` says when it moves.

    Many methods: copies begin and end, both ways.
    """

    def __init__(self, optimizer: optim.Optimizer, depot: Depot, tier: str, say: Callable[[str], None]) -> None:
        self.optimizer = optimizer
        self._depot = depot
        self._tier = tier
        self._say_once = Once(say)
        self._moved_nbytes = 0
        self._updating = 0
        self._stays = False  # what is fetched is not parked again
        self._lock = threading.RLock()
        self._leaving: list[_Leaving] = []

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        """Within, it is an update that reads state, or the package itself."""
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1

    @uncompiled
    def _park(self, p: torch.Tensor, held: Mapping[int, int], later: bool = False) -> None:
        """Park the state of a parameter. `held`: identity of a tensor or dict -> how often a step holds it that will not read
        it. `later`: only begin to.
        """
        with self._lock:
            states: dict[Any, Any] = self.optimizer.state
            if p not in states or not states[p]:  # no update has made it yet
                return
            if type(states[p]) is not ParkedState:
                if type(states[p]) is not dict or references(states, p) - held.get(id(states[p]), 0) > ALONE[0]:
                    self._tell("its dicts are held elsewhere, and stay on the device")
                    return
                states[p] = ParkedState(states[p], self._read)
            state = states[p]
            state.read_by(self._read)  # an earlier plan may have parked it
            for name in tuple(state.coming):  # the update left it out
                self._stop(state, name)
            for name in tuple(dict.keys(state)):
                if name not in state.away and may_be_parked(dict.__getitem__(state, name)):
                    self._park_one(state, name, held, later)

    def _park_one(self, state: ParkedState, name: Any, held: Mapping[int, int], later: bool = False) -> None:
        counts = use_counts(state, name)
        t: torch.Tensor = dict.__getitem__(state, name)
        if counts[0] - held.get(id(t), 0) > ALONE[0] or counts[1:] != ALONE[1:]:
            self._tell(f"some of it ({name!r}) is held elsewhere, and stays on the device")
            return
        with below_autograd(), unwatched():
            flat = bytes_of(t)
            try:
                stored = self._depot.store(self._tier, flat, f"optimizer state {name!r}")
                if later:
                    self._leaving.append(_Leaving(state, name, id(t), t._version, stored))
                    return
                stored.wait_stored()
            except OffloadError as error:
                self._tell(f"{error}: it stays on the device", f"{name!r} is not stored")  # the error's numbers differ
                return
            del flat
            self._leave_one(state, name, t, stored)

    def _leave_one(self, state: ParkedState, name: Any, t: torch.Tensor, stored: Stored) -> None:
        """Below autograd: the copy out has ended."""
        if not t.untyped_storage().resizable():  # a checkpoint's, as `torch.load` makes it
            t.set_(torch.empty_like(t).copy_(t).untyped_storage(), 0, t.size(), t.stride())
        state.away[name] = stored  # S1: before the storage is emptied
        empty_storage(t)
        leaves(t)

    @uncompiled
    def _leave(self) -> None:
        """State whose copy out was begun leaves, after that copy."""
        with self._lock, below_autograd(), unwatched():
            while self._leaving:
                state, name, identity, version, stored = self._leaving.pop()
                try:
                    stored.wait_stored()
                except OffloadError as error:
                    self._tell(f"{error}: it stays on the device")
                    continue
                if self._is_as_copied(state, name, identity, version):
                    self._leave_one(state, name, dict.__getitem__(state, name), stored)
                else:  # it is parked with all that is on the device when the next step begins
                    stored.release()

    @staticmethod
    def _is_as_copied(state: ParkedState, name: Any, identity: int, version: int) -> bool:
        """Whether a tensor of this state is the one that was copied, unchanged, and nobody else holds it (S2, S3)."""
        t = dict.get(state, name)
        if id(t) != identity or not isinstance(t, torch.Tensor) or t._version != version:
            return False
        del t
        return use_counts(state, name) == ALONE

    @uncompiled
    def _begin(self, p: torch.Tensor) -> None:
        """Begin to copy back the state of a parameter that is updated next. Without room for it, it comes when it is read."""
        with self._lock, contextlib.suppress(torch.OutOfMemoryError):
            state = self.optimizer.state.get(p)
            if type(state) is ParkedState:
                for name in state.away:
                    if name not in state.coming:
                        self._begin_one(state, name)

    def _begin_one(self, state: ParkedState, name: Any) -> None:
        t, stored = dict.__getitem__(state, name), state.away[name]
        with below_autograd(), unwatched():
            state.coming[name] = False
            if not t.untyped_storage().nbytes():  # else a copy may still be writing to this memory
                # what stays is counted as all memory of the loop
                with contextlib.nullcontext() if self._stays else unobserved(t.device):
                    t.untyped_storage().resize_(stored.nbytes)
            stored.fetch(bytes_of(t))
            state.coming[name] = True

    def _stop(self, state: ParkedState, name: Any) -> None:
        """What came back is not needed."""
        with below_autograd(), unwatched():
            with contextlib.suppress(OffloadError):
                state.away[name].wait_fetched()
            empty_storage(dict.__getitem__(state, name))
        del state.coming[name]

    @uncompiled
    def _read(self, state: ParkedState, name: Any) -> None:
        """A tensor that is away is read: fill its storage again."""
        with self._lock:
            stored = state.away.get(name)
            if stored is None:
                return
            if not state.coming.get(name):
                self._begin_one(state, name)
            state.coming[name] = False  # a copy that fails, or whose wait is interrupted, begins anew
            with below_autograd(), unwatched():
                stored.wait_fetched()
            if not self._updating:
                wait_on_host(dict.__getitem__(state, name).device)
            del state.coming[name]
            del state.away[name]  # S1: after the copy back
            stored.release()
            self._moved_nbytes += 2 * stored.nbytes if self._updating else 0
            if not self._updating:
                self._tell("the loop reads it between updates, and it comes back for that; it is parked again in the next step")

    def _tell(self, what: str, key: str = "") -> None:
        """`key`: see `Once`."""
        self._say_once(f"MemOpt: optimizer state that the plan parks: {what}", key)


def parkable(optimizer: optim.Optimizer, p: torch.Tensor) -> list[int]:
    """Bytes of each tensor of a parameter's state that may be parked, or is."""
    state = optimizer.state.get(p)
    if not isinstance(state, dict):
        return []
    away = state.away if type(state) is ParkedState else {}
    there = (t for name, t in dict.items(state) if name not in away and may_be_parked(t))
    return [stored.nbytes for stored in away.values()] + [t.nbytes for t in there]


def may_be_parked(t: Any) -> bool:
    """Whether this tensor can be parked, if nobody else holds it."""
    return (
        isinstance(t, torch.Tensor)
        and is_plain(t)
        and t.nbytes >= LEAST_NBYTES
        and not t.requires_grad
        and not in_shared_memory(t)
        and fills(t)
    )
