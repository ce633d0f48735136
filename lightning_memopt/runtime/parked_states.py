"""Optimizer state that is parked in a tier, and is on the device only while an update reads it.

The optimizer computes the bits that it computes without us: its tensors come back when they are read (state_copies.py has the
rules). `Optimizer.step` goes through its groups one after the other: for one step, `Chunks` gives it smaller groups, so that
the state of only a few parameters is on the device: that of the chunk which is updated and, if both take no more than the
largest chunk, that of the next one, which comes while this one goes. Checkpoints, copies and pickles have plain dicts, with
tensors that have their bytes.

In backward, copies may run while it goes on: then the state of the next early update comes, and that of the last one leaves,
while the next gradient is computed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import optim

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.record.backwards import after_failed_backwards
from lightning_memopt.runtime.holders import held_by
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.parked_gradients import ParkedGradients
from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.state_chunks import Chunks, chunks_of
from lightning_memopt.runtime.state_copies import StateCopies
from lightning_memopt.runtime.state_dicts import ParkedState
from lightning_memopt.runtime.tiers.streams import wait_on_host
from lightning_memopt.torch_private import gradient_of, queue_callback

Sizes = Mapping[torch.Tensor, int]
"""Parameter -> bytes that are parked of it."""


def is_any_parked() -> bool:
    """Whether state of any optimizer is parked between its updates."""
    return len(_living) > 0


class ParkedStates(StateCopies):
    """The state of some parameters of one optimizer, parked in a tier between updates, and perhaps gradients.

    parameters: these parameters.
    weights: those that are parked, and are updated in the same chunks; None if none ever was.

    Many methods: it parks and fetches all state, and is told of each update.
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
        super().__init__(optimizer, depot, tier, say)
        self.parameters = list(parameters)
        self._nbytes = {id(p): nbytes for p, nbytes in parameters.items()}
        self._gradients = gradients
        self.weights = weights
        self._following: dict[int, torch.Tensor] = {}
        self._later: frozenset[int] = frozenset()
        self._turns: frozenset[int] = frozenset()
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

    def tell_of_checkpoint(self) -> None:
        self._tell("the device has no room for all of it at once, so a checkpoint has it in the host's memory")


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


def _with_plain_states(parked: weakref.ref[ParkedStates], _: optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """A checkpoint is made: it has plain dicts. Where the device has no room for all state, what is away is in the host's
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
