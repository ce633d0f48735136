"""Gradients that are parked in memory beside the device from when autograd has accumulated them until the optimizer reads them.

A gradient that is away can be read and written (tiers/exchanged.py has the rules): by clipping, a GradScaler, another backward
that adds to it. A step of the optimizer has the gradients of a chunk of parameters on the device at a time (state_chunks.py).

A gradient may leave *later*: its copy runs while backward goes on, and it is on the device until the next one is accumulated.

Q1. A parameter has one place in the tier. A gradient that somebody still holds when the next one comes, goes back to the device
    before its place is written. One whose memory was handed out stays where it is, and its bytes with it.
Q2. At the end of a run all gradients are on the device again, as far as it has room for them. The others keep their place in
    the tier as long as they live.
Q3. A gradient that was written while its copy ran is copied again. One that a hook of the user may write where no version
    counter shows it does not leave later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import optim

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.logs import Once
from lightning_memopt.record import fills, is_plain, uncompiled, unwatched
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.leaving import leaves
from lightning_memopt.record.tensors import bytes_of, in_shared_memory, is_foreign
from lightning_memopt.runtime.tiers.exchanged import NOTHING, Exchanged
from lightning_memopt.runtime.tiers.shelf import AWAY, Shelf, on_shelf, storage_on
from lightning_memopt.runtime.tiers.streams import OwnStreams, copy, marked, queued_on
from lightning_memopt.torch_private import accumulation_hooks, gradient_of, queue_callback, remove_accumulation_hook, storage_id

_PACKAGE = __name__.partition(".")[0]
_ONLY_READ = (optim.Adam, optim.AdamW)
"""Optimizers that do not write gradients, unless they are fused: then they may scale them."""


def may_be_parked(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient can be parked."""
    return (
        gradient is not None
        and is_plain(gradient)
        and fills(gradient)
        and gradient.nbytes > 0
        and not gradient.requires_grad
        and not in_shared_memory(gradient)
        and not is_foreign(gradient)
    )


class _Leaving(NamedTuple):
    """A gradient that is being copied to the tier, and is on the device meanwhile.

    flat: its bytes, which stay as long as the copy runs. address, version: where they were, and which, when it began.
    memory: where they go. copied: the event after the copy.
    """

    gradient: torch.Tensor
    flat: torch.Tensor
    address: int
    version: int
    memory: memoryview
    copied: Any


class _Place(Exchanged):
    """The place of one parameter's gradients in the tier, which they have in turns."""

    def __init__(self, shelf: Shelf, nbytes: int) -> None:
        super().__init__(shelf, nbytes)
        self._storage: weakref.ref[Any] = weakref.ref(torch.empty(0).untyped_storage())  # of the gradient that has this place

    def has(self, gradient: torch.Tensor) -> bool:
        """Whether this gradient has this place, on the device or away."""
        return self._storage() is gradient.untyped_storage()

    def is_away(self, gradient: torch.Tensor) -> bool:
        storage = gradient.untyped_storage()
        return self._storage() is storage and storage.data_ptr() == self._away_at

    def park(self, gradient: torch.Tensor) -> None:
        """Raises OffloadError where it cannot be copied."""
        if gradient.nbytes > self.nbytes:
            return
        if not self.has(gradient):
            self.bring_home()  # Q1
        elif self.is_away(gradient) and (self._shelf.keeps_writes or gradient._version == self._version):
            return
        flat = bytes_of(gradient)
        self._is_in_tier(gradient, flat, self._shelf.put(flat, self._offset, "a gradient"))

    def begin_leaving(self, gradient: torch.Tensor, stream: Any) -> _Leaving | None:
        """Begin to copy it out on this stream. Returns None where it did not: it is away, or has to leave at once."""
        if gradient.nbytes > self.nbytes or self.is_away(gradient):
            return None
        if not self.has(gradient):
            self.bring_home()  # Q1
        flat, streams = bytes_of(gradient), backend_of(gradient.device).streams
        written = marked(streams, streams.current_stream(gradient.device))
        with queued_on(streams, stream, gradient.device):
            stream.wait_event(written)
            memory = self._shelf.put(flat, self._offset, "a gradient")
        return _Leaving(gradient, flat, flat.data_ptr(), gradient._version, memory, marked(streams, stream))

    def end_leaving(self, leaving: _Leaving) -> torch.Tensor | None:
        """The gradient whose copy was begun is away, after that copy. Returns it if it has to be copied again (Q3)."""
        gradient, flat = leaving.gradient, leaving.flat
        backend_of(flat.device).streams.current_stream(flat.device).wait_event(leaving.copied)
        is_same = gradient.untyped_storage().data_ptr() == leaving.address and gradient._version == leaving.version
        if not is_same or is_foreign(gradient):
            return gradient
        self._is_in_tier(gradient, flat, leaving.memory)
        return None

    def _is_in_tier(self, gradient: torch.Tensor, flat: torch.Tensor, memory: memoryview) -> None:
        """The bytes of a gradient, as they are now, are in this memory of the tier: it leaves."""
        self._beside, self._here_at = storage_on(memory), 0
        if not self.has(gradient):
            self._storage = weakref.ref(gradient.untyped_storage())
            # also if somebody gives it other memory; another storage may get this identity
            weakref.finalize(gradient.untyped_storage(), AWAY.discard, storage_id(gradient)).atexit = False
        self._version = gradient._version
        self._leave(flat)
        leaves(flat)

    def fetch(self, gradient: torch.Tensor) -> int:
        """The gradient is on the device, for work on the current stream. Returns the bytes that were copied."""
        if not self.is_away(gradient) or is_foreign(gradient):  # X5
            return 0
        flat = bytes_of(gradient)
        here = self._empty(flat)
        copy(here, flat)
        self._version = gradient._version
        self._come(flat, here)
        return gradient.nbytes

    def drop(self, gradient: torch.Tensor, changed: bool) -> None:
        """The gradient is away again. `changed`: it may have been written where no version counter shows it."""
        storage = gradient.untyped_storage()
        if not self._here_at or self._storage() is not storage or storage.data_ptr() != self._here_at:
            return
        if is_foreign(gradient):  # X5
            self._here_at, self._beside = 0, NOTHING
        elif changed or gradient._version != self._version:
            self.park(gradient)  # X2
        else:
            flat = bytes_of(gradient)
            self._leave(flat)
            leaves(flat)

    def bring_home(self) -> None:
        """Whoever still holds the gradient that has this place, has it on the device. Raises torch.OutOfMemoryError where there
        is no room: it stays here.
        """
        storage = self._storage()
        if storage is not None and storage.data_ptr() == self._away_at:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if is_foreign(flat):  # X5
                pages = flat[:: mmap.PAGESIZE]
                pages.copy_(pages.clone())  # pages that are written are no longer those of the file
                AWAY.discard(storage_id(flat))
            else:
                self._come_home(flat, flat)
        self._here_at = 0

    def outlives(self, run: Any) -> None:
        """The gradient that has this place keeps it, with the tier's memory, after the end of `run`."""
        storage = self._storage()
        if storage is not None:
            weakref.finalize(storage, _nothing, run).atexit = False

    def forget(self) -> None:
        """The gradient that has this place is on the device, whoever has brought it there (`resize_`)."""
        storage = self._storage()
        if storage is not None:
            AWAY.discard(storage._cdata)


class ParkedGradients:
    """Gradients of some parameters of one optimizer, on one device, parked until its step reads them.

    moved_nbytes: bytes that were copied so far, out and back.
    nbytes, places: identity of a parameter -> bytes of its gradient, and their place.
    tier_nbytes: bytes that all places take.

    Raises OffloadError where there is no memory for them.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        nbytes: Mapping[torch.Tensor, int],
        directory: str | None,
        say: Callable[[str], None],
        limit_nbytes: int | None = None,
    ) -> None:
        """`nbytes`: parameter -> bytes of its gradient. `directory`: for files; None: the system's. `limit_nbytes`: the most
        bytes that this process may have in such tiers.
        """
        self.moved_nbytes = 0
        self._optimizer = optimizer
        self._say_once = Once(say)
        self._lock = threading.RLock()
        self._parameters = list(nbytes)
        self.tier_nbytes = on_shelf(nbytes.values())
        self._shelf = Shelf(self.tier_nbytes, directory, self._parameters[0].device, limit_nbytes)
        self.nbytes = {id(p): n for p, n in nbytes.items()}
        self.places = {key: _Place(self._shelf, n) for key, n in self.nbytes.items()}
        self._later: frozenset[int] = frozenset()
        self._turns: frozenset[int] = frozenset()
        self._leaving: tuple[torch.Tensor, _Place, _Leaving] | None = None
        self._streams = OwnStreams()
        _living.add(self)
        try:
            for p in self._parameters:
                _listen(p, self._accumulated)
        except BaseException:  # an interrupt, too
            remove_accumulation_hook(self._parameters, self._accumulated)
            raise

    def leave_later(self, until: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """From now on, the gradients of these parameters leave when that of another one is accumulated, and no others do.
        `until`: parameter -> the other one.
        """
        self._later, self._turns = frozenset(map(id, until)), frozenset(map(id, until.values()))

    @uncompiled
    def _accumulated(self, p: torch.Tensor) -> None:
        """Autograd has added to the gradient of a parameter."""
        later = id(p) in self._later and not has_hooks_of_others(p)
        if later or id(p) in self._turns:
            self.leave()
        self.moved_nbytes += self._park(p, later)

    @uncompiled
    def leave(self) -> None:
        """The gradient whose copy was begun leaves."""
        with self._lock:
            leaving, self._leaving = self._leaving, None
            if leaving is None:
                return
            p, place, begun = leaving
            with below_autograd(), unwatched():
                again = place.end_leaving(begun)
            if again is not None and gradient_of(p) is again:
                self._park(p)

    def park(self) -> None:
        """Park all gradients that are on the device."""
        self.leave()
        for p in self._parameters:
            self._park(p)

    def _park(self, p: torch.Tensor, later: bool = False) -> int:
        """Returns the bytes that left the device, or do so `later`."""
        gradient = gradient_of(p)
        if gradient is not None and is_plain(gradient) and is_foreign(gradient):
            self._tell("others have the memory of some (`numpy()`), which stay where they are")
        if gradient is None or not may_be_parked(gradient) or gradient.device != p.device:
            return 0
        with self._lock, below_autograd(), unwatched():
            place = self.places[id(p)]
            was_away = place.is_away(gradient)
            try:
                begun = place.begin_leaving(gradient, self._streams[gradient.device]) if later else None
                if begun is None:
                    place.park(gradient)
                else:
                    self._leaving = p, place, begun
                    queue_callback(self.leave)
            except OffloadError as error:
                self._tell(f"{error}: it stays on the device", "not stored")  # the error's numbers differ
                return 0
            return 0 if was_away else gradient.nbytes

    @contextlib.contextmanager
    def there(self, parameters: Sequence[torch.Tensor], fused: bool = False) -> Iterator[None]:
        """Within, the gradients of these parameters are on the device: the optimizer reads them, by fused kernels or not. Where
        there is no room for one, it is read where it is.
        """
        self.leave()
        gradients = [(self.places[id(p)], g) for p in parameters if id(p) in self.places and (g := gradient_of(p)) is not None]
        if not self._say_once.keys and not all(place.has(gradient) for place, gradient in gradients if is_plain(gradient)):
            self._tell("the loop gives parameters others (`p.grad = ...`), or views of one tensor, which stay on the device")
        with self._lock, below_autograd(), unwatched(), contextlib.suppress(torch.OutOfMemoryError):
            for place, gradient in gradients:
                self.moved_nbytes += place.fetch(gradient)
        yield
        may_write = fused or type(self._optimizer) not in _ONLY_READ
        with self._lock, below_autograd(), unwatched():
            for place, gradient in gradients:
                place.drop(gradient, may_write)

    def park_only(self, parameters: Collection[torch.Tensor]) -> None:
        """From now on, only the gradients of these parameters are parked."""
        self.leave()
        remove_accumulation_hook([p for p in self._parameters if p not in parameters], self._accumulated)
        self._parameters = [p for p in self._parameters if p in parameters]
        kept = set(map(id, self._parameters))
        self._bring_home(self.places.keys() - kept)
        self.places = {key: place for key, place in self.places.items() if key in kept}
        self.nbytes = {key: self.nbytes[key] for key in self.places}

    def before_fork(self) -> None:
        if all(on_host(p.device) for p in self._parameters):
            self._bring_home(self.places)

    def close(self) -> None:
        """Q2. May be called again."""
        self.leave()
        remove_accumulation_hook(self._parameters, self._accumulated)
        if self._bring_home(self.places):
            self._shelf.close()
        else:
            self._tell("the device has no room for all of them at the end of the run, so they stay in the tier")

    def _bring_home(self, keys: Iterable[int]) -> bool:
        """Whether the device had room for all of these gradients."""
        all_there = True
        with self._lock, below_autograd(), unwatched():
            for key in keys:
                try:
                    self.places[key].bring_home()
                    self.places[key].forget()
                except torch.OutOfMemoryError:
                    all_there = False
                    self.places[key].outlives(self._shelf)
        return all_there

    def _tell(self, what: str, key: str = "") -> None:
        """`key`: see `Once`."""
        self._say_once(f"MemOpt: gradients that the plan parks: {what}", key)


def has_hooks_of_others(p: torch.Tensor) -> bool:
    """Whether somebody else is told when the gradient of this parameter was accumulated, and may write it."""
    return any(not str(hook.__module__).startswith(f"{_PACKAGE}.") for hook in accumulation_hooks(p))


def _listen(p: torch.Tensor, accumulated: Callable[[torch.Tensor], None]) -> None:
    """Register this hook of a parameter, which may be frozen for now: a loop that trains two networks in turns does so."""
    is_trained = p.requires_grad
    try:
        p.requires_grad_(True).register_post_accumulate_grad_hook(accumulated)
    finally:
        p.requires_grad_(is_trained)


def _nothing(_: Any) -> None:
    pass


def whose_gradients_are_parked() -> set[int]:
    """Identities of the parameters whose gradients are parked as soon as they are accumulated."""
    return {key for gradients in _living for key in gradients.places} if _living else set()


_living: weakref.WeakSet[ParkedGradients] = weakref.WeakSet()


def _before_fork() -> None:
    """What is written to a file later shows in the memory of a forked process. So gradients of the CPU are on it then."""
    for gradients in tuple(_living):
        gradients.before_fork()


os.register_at_fork(before=_before_fork)
