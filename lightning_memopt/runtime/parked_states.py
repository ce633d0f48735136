"""Optimizer state that is parked in a tier, and is on the device only while an update reads it.

The tensors stay the user's own objects. Only their storages are emptied and filled again, so the optimizer computes the bits
that it computes without us. A parameter's state is a dict (`ParkedState`) whose tensors come back when they are read, whoever
reads them: the update, `state_dict()`, a loop that logs a norm. `Optimizer.step` goes through its groups one after the other:
for one step, `Chunks` gives it smaller groups, so that the state of only a few parameters is on the device: that of the chunk
which is updated and, if both take no more than the largest chunk, that of the next one, which comes while this one goes.

S1. A storage is emptied only after its copy out has ended, and its copy is dropped only after the copy back has: whatever fails
    or is interrupted, one of the two has all bytes.
S2. A tensor is parked only if nobody but the optimizer holds it, its storage, or the dict that it is in.
S3. Checkpoints, copies and pickles have plain dicts, with tensors that have their bytes.
S4. State that was written while its copy ran is copied again.

In backward, copies may run while it goes on: then the state of the next early update comes, and that of the last one leaves,
while the next gradient is computed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import optim

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.logs import Once
from lightning_memopt.record import fills, is_plain, uncompiled, unwatched
from lightning_memopt.record.backwards import after_failed_backwards
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.leaving import leaves
from lightning_memopt.record.tensors import bytes_of, in_shared_memory
from lightning_memopt.runtime.holders import ALONE, held_by, references, use_counts
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.parked_gradients import ParkedGradients
from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.state_chunks import Chunks, chunks_of
from lightning_memopt.runtime.state_dicts import ParkedState
from lightning_memopt.runtime.tiers import Stored
from lightning_memopt.runtime.tiers.shelf import unobserved
from lightning_memopt.runtime.tiers.streams import empty_storage, wait_on_host
from lightning_memopt.torch_private import gradient_of, queue_callback

Sizes = Mapping[torch.Tensor, int]
"""Parameter -> bytes that are parked of it."""


def is_any_parked() -> bool:
    """Whether state of any optimizer is parked between its updates."""
    return len(_living) > 0


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


class ParkedStates:
    """The state of some parameters of one optimizer, parked in a tier between updates, and perhaps gradients.

    parameters: these parameters.
    weights: those that are parked, and are updated in the same chunks; None if none ever was.

    Many methods: it parks and fetches all state, that of one parameter, and one tensor, and it is told of each update.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parameters: Sizes,
        depot: Depot,
        tier: str,
        say: Callable[[str], None],
        gradients: ParkedGradients | None = None,
        weights: ParkedWeights | None = None,
    ) -> None:
        """`parameters`: parameter -> bytes of its state that are parked, now or after the update that makes it. `gradients`:
        those that are parked; updates read them in the same chunks.
        """
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self._moved_nbytes = 0
        self._depot = depot
        self._tier = tier
        self._say_once = Once(say)
        self._updating = 0
        self._stays = False  # what is fetched is not parked again
        self._lock = threading.RLock()
        self._nbytes = {id(p): nbytes for p, nbytes in parameters.items()}
        self._gradients = gradients
        self.weights = weights
        self._following: dict[int, torch.Tensor] = {}
        self._later: frozenset[int] = frozenset()
        self._turns: frozenset[int] = frozenset()
        self._leaving: list[_Leaving] = []
        self._listening = contextlib.ExitStack()
        weakref.finalize(self, self._listening.close).atexit = False
        self._groups: list[dict[str, Any]] | None = None
        self._hook: Any = optimizer.register_state_dict_post_hook(partial(_with_plain_states, weakref.ref(self)))
        _living.add(self)

    def has(self, p: torch.Tensor) -> bool:
        """Whether it is one of these parameters."""
        return id(p) in self._nbytes

    def copy_beside_backward(
        self, following: Mapping[torch.Tensor, torch.Tensor], until: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """From now on, these copies run while backward goes on, and no others. `following`: parameter -> the one whose state
        comes when this one is updated. `until`: parameter -> the one with whose state, or gradient, its own leaves.
        """
        self._following = {id(p): after for p, after in following.items()}
        self._later, self._turns = frozenset(map(id, until)), frozenset(map(id, until.values()))
        if self._gradients is not None:
            self._gradients.leave_later(until)
        self._listening.close()
        if until:
            self._listening.enter_context(after_failed_backwards(partial(_backward_failed, weakref.ref(self))))

    # -- all state ---------------------------------------------------------------------------------

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were copied so far, out and back."""
        return self._moved_nbytes + (0 if self._gradients is None else self._gradients.moved_nbytes)

    @property
    def gradients_nbytes(self) -> int:
        """Bytes that the tier has for gradients."""
        return 0 if self._gradients is None else self._gradients.tier_nbytes

    def park(self) -> None:
        """Park all that is on the device."""
        self._leave()
        for p in self.parameters:
            self._park(p, {})
        if self._gradients is not None:
            self._gradients.park()

    def fetch(self) -> None:
        """Put all state on the device, into plain dicts, as it is without us."""
        self._give_back_groups()
        self._fetch(self.parameters)

    def leave(self) -> None:
        """What is being copied in backward leaves."""
        self._leave()
        if self._gradients is not None:
            self._gradients.leave()

    def _fetch(self, parameters: Iterable[torch.Tensor]) -> None:
        self._leave()
        self._stays = True
        try:
            with self._update():
                for p in parameters:
                    state = self.optimizer.state.get(p)
                    if type(state) is ParkedState:
                        self.optimizer.state[p] = state.plain()
        finally:
            self._stays = False
        for device in {p.device for p in parameters}:
            wait_on_host(device)

    def add(self, parameters: Sizes, gradients: Sizes, parked: Callable[[optim.Optimizer, Sizes], Any]) -> None:
        """These are parked from now on: all that were, and others. `parked`: returns such ParkedGradients, or None."""
        self.parameters = list(parameters)
        self._nbytes = {id(p): nbytes for p, nbytes in parameters.items()}
        if len(gradients) > (0 if self._gradients is None else len(self._gradients.places)):
            self._close_gradients()
            self._gradients = parked(self.optimizer, gradients)

    def _close_gradients(self) -> None:
        if self._gradients is not None:
            self._moved_nbytes += self._gradients.moved_nbytes
            self._gradients.close()
            self._gradients = None

    def park_only(self, states: Collection[torch.Tensor], gradients: Collection[torch.Tensor]) -> None:
        """From now on, only the state and the gradients of these parameters are parked."""
        if self._gradients is not None:
            self._gradients.park_only(gradients)
            if not self._gradients.places:
                self._close_gradients()
        goes, self.parameters = self.parameters, [p for p in self.parameters if p in states]
        self._nbytes = {id(p): self._nbytes[id(p)] for p in self.parameters}
        self._fetch([p for p in goes if p not in states])

    def close(self) -> bool:
        """Nothing is parked any more, as far as the device has room for it. May be called again. Returns whether all is there:
        otherwise it stays in the tier, and comes back as it is read.
        """
        self._close_gradients()
        self._listening.close()
        self._leave()
        has_room = _have_room(state for p in self.parameters if type(state := self.optimizer.state.get(p)) is ParkedState)
        try:
            if has_room:
                self.fetch()
        except torch.OutOfMemoryError:  # no piece of it is large enough
            has_room = False
        if not has_room:
            self._give_back_groups()
            self._tell("the device has no room for all of it at once, so it stays in the tier, and comes back as it is read")
            return False
        self.parameters = []
        self._nbytes = {}
        self._hook.remove()
        return True

    # -- updates -----------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The optimizer is about to step: it gets its parameters in chunks."""
        self._leave()
        self._give_back_groups()
        self._groups = self.optimizer.param_groups
        code = inspect.unwrap(type(self.optimizer).step).__code__
        self.optimizer.param_groups = Chunks(self._groups, code, self._in_chunks)

    def step_ended(self) -> None:
        """A step is over: park what it did not."""
        if self._groups is not None:
            self._give_back_groups()
            self._tell("its step does not go through its groups, so all state was on the device at once")
        self.park()

    def _give_back_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None and type(self.optimizer.param_groups) is Chunks:
            groups[:] = self.optimizer.param_groups  # a hook may have added one
            self.optimizer.param_groups = groups

    def _in_chunks(self, step: FrameType) -> Iterator[dict[str, Any]]:
        """The groups of the step that runs in this frame, in chunks. A chunk's state is parked when the next one begins."""
        groups = self._groups or self.optimizer.param_groups
        self._give_back_groups()  # whatever the step raises, it has them back
        gradients, weights = self._gradients, self.weights
        nbytes = Counter(self._nbytes)
        nbytes.update({} if gradients is None else gradients.nbytes)
        nbytes.update({} if weights is None else weights.nbytes_of(p for group in groups for p in group["params"]))
        chunks = chunks_of(groups, nbytes)
        with self._update():
            for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
                if following is not None and following.comes_ahead:
                    for p in filter(self.has, following.params):
                        if gradient_of(p) is not None:  # else it was updated early
                            self._begin(p)
                with contextlib.ExitStack() as there:
                    if weights is not None:
                        there.enter_context(weights.there(chunk.params))
                    if gradients is not None:
                        there.enter_context(gradients.there(chunk.params, bool(chunk.group.get("fused"))))
                    yield {**chunk.group, "params": chunk.params}
                held = held_by(step)
                for p in filter(self.has, chunk.params):
                    self._park(p, held)

    @contextlib.contextmanager
    def updating(self, p: torch.Tensor) -> Iterator[None]:
        """Around the update of one of these parameters in backward."""
        if id(p) in self._turns:
            self._leave()
        following = self._following.get(id(p))
        if following is not None:
            self._begin(following)
        with self._update():
            yield
        later = id(p) in self._later
        self._park(p, {}, later)
        if later:
            queue_callback(self._leave)

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        """Within, it is an update that reads state, or the package itself."""
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1

    # -- one parameter -----------------------------------------------------------------------------

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
        """Whether a tensor of this state is the one that was copied, unchanged, and nobody else holds it (S2, S4)."""
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

    def tell_of_checkpoint(self) -> None:
        self._tell("the device has no room for all of it at once, so a checkpoint has it in the host's memory")

    def _tell(self, what: str, key: str = "") -> None:
        """`key`: see `Once`."""
        self._say_once(f"MemOpt: optimizer state that the plan parks: {what}", key)


_living: weakref.WeakSet[ParkedStates] = weakref.WeakSet()


def _backward_failed(parked: weakref.ref[ParkedStates]) -> None:
    """What is being copied may be written from now on."""
    states = parked()
    if states is not None:
        states.leave()


def _before_fork() -> None:
    """A forked process cannot read the tier, so it gets all state of the CPU. The parent parks its own in the next step."""
    for states in tuple(_living):
        if all(on_host(p.device) for p in states.parameters):
            states.fetch()


os.register_at_fork(before=_before_fork)


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


def _with_plain_states(parked: weakref.ref[ParkedStates], _: optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """A checkpoint is made: it has plain dicts (S3). Where the device has no room for all state, what is away is in the host's
    memory there.
    """
    states = checkpoint["state"]
    fits, by = _have_room(state for state in states.values() if type(state) is ParkedState), parked()
    if not fits and by is not None:
        by.tell_of_checkpoint()
    for key, state in states.items():
        if type(state) is ParkedState:
            states[key] = state.plain() if fits else state.on_host()


def _have_room(states: Iterable[ParkedState]) -> bool:
    """Whether the device has room for all that is away of these states."""
    nbytes: Counter[torch.device] = Counter()
    for state in states:
        for name, stored in state.away.items():
            nbytes[dict.__getitem__(state, name).device] += 0 if state.coming.get(name) else stored.nbytes
    left = {device: backend_of(device).left_nbytes() for device in nbytes}
    return all(most is None or nbytes[device] <= most for device, most in left.items())
