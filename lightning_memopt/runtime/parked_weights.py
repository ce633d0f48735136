"""Weights that are parked in memory beside the device, and are on the device only while their module runs, or are updated.

A weight that is away can be read and written (tiers/exchanged.py has the rules). It may be copied ahead of its module, on a
stream of its own, while another module computes. Until its module runs, it stays away.

W1. The tier has room for all weights until the run is over. Then they are on the device again.
W2. A copy ahead begins after all work that was queued on the current stream, so after that which used its memory before. The
    module's work begins after the copy, and so does whatever gets this memory next. If the weight was written meanwhile, it is
    copied again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.logs import Once, silent
from lightning_memopt.plan import WeightParking
from lightning_memopt.record import beneath_calls, uncompiled, unwatched
from lightning_memopt.record.backwards import after_failed_backwards
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.nodes import nodes_of
from lightning_memopt.runtime.tiers.shelf import Shelf, on_shelf
from lightning_memopt.runtime.tiers.streams import OwnStreams, marked, queued_on
from lightning_memopt.runtime.weight_memory import WeightMemory
from lightning_memopt.torch_private import (
    backward_task,
    gradient_of,
    has_hooks,
    queue_callback,
)

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class _Unit:
    """The parked weights of one module. Raises OffloadError where there is no room for them.

    device: the device of all of them.
    calls: how many calls of the module are running.
    in_backward: whether they come for backward, too: else nothing reads or writes them there.
    next: for the forward and for backward, the unit that is copied ahead while this one computes.
    """

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor], shelf: Shelf) -> None:
        self.calls = 0
        self.in_backward = True
        self.device = weights[0].device
        self.next: dict[Direction, _Unit] = {}
        self._streams = backend_of(self.device).streams
        self._copies_on: Any = None  # a stream that has a copy ahead, for which no other waits yet
        self._module = weakref.ref(module)
        self.listening = contextlib.ExitStack()
        self._shelf = shelf
        self._weights: list[WeightMemory] = []
        try:
            with below_autograd(), unwatched():
                for weight in weights:
                    self._weights.append(WeightMemory(weight, shelf))
        except BaseException:
            self.close()
            raise

    def called(self, more: int) -> None:
        """A call of the module begins (1), or ends (-1), in any thread."""
        self.calls += more
        for weight in self._weights:
            weight.users += more

    def has(self, module: nn.Module, weights: Sequence[torch.Tensor]) -> bool:
        own = self._weights
        return (
            self._module() is module and len(own) == len(weights) and all(w.parks(p) for w, p in zip(own, weights, strict=True))
        )

    @property
    def is_current(self) -> bool:
        """Whether the weights have the storages that are parked."""
        return all(weight.is_current for weight in self._weights)

    @property
    def tier_nbytes(self) -> int:
        return on_shelf(weight.nbytes for weight in self._weights)

    def trained(self) -> Iterator[tuple[int, WeightMemory]]:
        """Identity of each parameter that is trained, and its weight."""
        for weight in self._weights:
            if weight.is_trained:
                yield weight.identity, weight

    @property
    def away_nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights if weight.is_away)

    def copy_ahead(self, stream: Any) -> None:
        """Begin to copy what is away, on this stream (W2). Without room for it, it is copied when it is needed."""
        if self._copies_on is not None:
            return
        with below_autograd(), unwatched(), contextlib.suppress(torch.OutOfMemoryError):
            for weight in self._weights:
                weight.take_memory()
        stream.wait_event(marked(self._streams, self._streams.current_stream(self.device)))
        self._copies_on = stream  # before the first copy, which an interrupt may follow
        with queued_on(self._streams, stream, self.device), unwatched():
            for weight in self._weights:
                weight.copy_ahead()

    def _wait_copied(self) -> None:
        if self._copies_on is not None:
            self._streams.current_stream(self.device).wait_stream(self._copies_on)  # W2
            self._copies_on = None

    def fetch(self) -> None:
        with below_autograd(), unwatched():
            self._wait_copied()
            for weight in self._weights:
                weight.fetch()

    def stop(self) -> None:
        """What was copied ahead is not needed."""
        with below_autograd(), unwatched():
            self._wait_copied()
            for weight in self._weights:
                weight.stop()

    def drop(self, changed: bool = False) -> int:
        """Returns the bytes that were copied to the tier. Raises OffloadError where some cannot be: they stay on the device."""
        pairs = zip(self._weights, self._hooks_may_write(), strict=True)
        with below_autograd(), unwatched():
            return sum([weight.drop(changed or may_be_written) for weight, may_be_written in pairs])

    @property
    def is_lent(self) -> bool:
        """Whether some of them stay on the device because NumPy has their addresses."""
        return any(weight.is_lent for weight in self._weights)

    def _hooks_may_write(self) -> list[bool]:
        """For each weight, whether hooks of the user may have written it by `.data`, which moves no version counter: they clip
        weights that are trained. On the CPU, bytes are compared.
        """
        module = self._module()
        if on_host(self.device) or module is None:
            return [False] * len(self._weights)
        of_module = any(map(has_hooks, module.modules()))
        return [weight.is_trained and (of_module or weight.has_hooks) for weight in self._weights]

    def disown(self) -> None:
        """This process parks none of them: wherever they are, they stay."""
        self._weights.clear()

    def close(self) -> None:
        """W1. May be called again: a weight for which there is no room raises, and stays in the tier."""
        self.listening.close()
        self.stop()
        with below_autograd(), unwatched():
            while self._weights:
                self._weights[-1].close()
                self._weights.pop()
        self._shelf.close()


class ParkedWeights:
    """Weights of some modules that are parked: none at first.

    moved_nbytes: bytes that were copied so far, both ways.

    Many methods: units come and go with calls, with backward and with updates, and are copied ahead.
    """

    def __init__(self, say: Callable[[str], None] = silent) -> None:
        """`say`: tells the user a line."""
        self.moved_nbytes = 0
        self._say_once = Once(say)
        self._lock = threading.RLock()
        self._in_backward: _Unit | None = None
        self._coming: _Unit | None = None
        self._streams = OwnStreams()  # for copies ahead
        self._units: dict[str, _Unit] = {}
        self._trained: dict[int, WeightMemory] = {}  # by the identity of the parameter
        self._forward: tuple[weakref.WeakMethod[Callable[[], None]], int] | None = None
        self._forking: list[WeightMemory] = []
        self._listening = contextlib.ExitStack()
        weakref.finalize(self, self._listening.close).atexit = False
        _living.add(self)

    @property
    def paths(self) -> frozenset[str]:
        """The modules whose weights are parked."""
        return frozenset(self._units)

    def add(
        self,
        path: str,
        module: nn.Module,
        weights: Sequence[torch.Tensor],
        directory: str | None = None,
        limit_nbytes: int | None = None,
    ) -> None:
        """Park the weights of a module, which are on one device, from now on. `directory`: for files; None: the system's.
        `limit_nbytes`: the most bytes that this process may have in such tiers.

        Raises OffloadError.
        """
        shelf = Shelf(on_shelf(w.nbytes for w in weights), directory, weights[0].device, limit_nbytes)
        unit = self._units[path] = _Unit(module, weights, shelf)
        gone = weakref.finalize(module, unit.listening.close)  # else whoever listens to calls would hold the weights
        gone.atexit = False
        unit.listening.callback(gone.detach)
        unit.listening.enter_context(beneath_calls({path: module}, partial(self._called, unit), shares=True))
        self._trained.update(unit.trained())
        if len(self._units) == 1:
            self._listening.enter_context(after_failed_backwards(partial(_backward_failed, weakref.ref(self))))

    @property
    def tier_nbytes(self) -> int:
        """Bytes that all of them take in the tier."""
        return sum(unit.tier_nbytes for unit in self._units.values())

    def has(self, path: str, module: nn.Module, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these weights of this module are parked, and no others: the loop may have replaced it, or some of them."""
        return path in self._units and self._units[path].has(module, weights)

    def copy_ahead(self, weights: Iterable[WeightParking]) -> None:
        """From now on, copy these weights ahead where they say so, and no others. All that are parked are known."""
        self._see_trained()
        for unit in self._units.values():
            unit.next = {}
            unit.in_backward = True
        for parking in weights:
            following = self._units.get(parking.module)
            if following is not None:
                following.in_backward = len(parking.beside) > 1
            for direction, path in zip(_DIRECTIONS, parking.beside, strict=False):
                before = self._units.get(path)
                if following is not None and before is not None and copies_overlap(following.device):
                    before.next[direction] = following

    def forward_begins(self, pass_fences: Callable[[], None]) -> None:
        """A planned forward begins in this thread. `pass_fences`: a method that drops at once what the forward drops before its
        next op. Weights that come before that op take the room.
        """
        self._forward = weakref.WeakMethod(pass_fences), threading.get_ident()

    def park_only(self, paths: Collection[str]) -> None:
        """From now on, only the weights of these modules are parked; others are on the device, as without us. Raises
        torch.OutOfMemoryError where there is no room: they stay in the tier, and can be read.
        """
        self.backward_ended()
        for path in self.paths.difference(paths):
            self._units[path].close()
            del self._units[path]
        if not self._units:
            self._listening.close()
        self._see_trained()
        for unit in self._units.values():
            unit.next = {}

    def _see_trained(self) -> None:
        """Look which of the weights that are parked are trained now: loops freeze some, and unfreeze others."""
        self._trained = dict(pair for unit in self._units.values() for pair in unit.trained())

    def let_go(self) -> None:
        """Park no weights that have been given other storages meanwhile."""
        self.park_only([path for path, unit in self._units.items() if unit.is_current])

    def close(self) -> None:
        """All weights are on the device from now on. May be called again."""
        self.park_only(())

    @uncompiled
    def backward_ended(self, raised: bool = True) -> None:
        """`raised`: a backward that left weights on the device has raised, and they may have been written by `.data` since."""
        with self._lock:
            unit, self._in_backward = self._in_backward, None
            self._stop_copying()
            if unit is not None and not unit.calls:
                self._drop(unit, raised)

    def _stop_copying(self) -> None:
        if self._coming is not None:
            self._coming.stop()
            self._coming = None

    # -- weights are updated -------------------------------------------------------------------------

    def nbytes_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, int]:
        """Identity of a parameter -> its bytes, for those of these that are parked and trained."""
        return {id(p): self._trained[id(p)].nbytes for p in parameters if id(p) in self._trained}

    @property
    def trained(self) -> Set[int]:
        """Identities of the parameters that are parked and trained."""
        return self._trained.keys()

    def is_updated(self, p: torch.Tensor) -> None:
        """A parameter is about to be updated in backward."""
        weight = self._trained.get(id(p))
        if weight is not None:
            with below_autograd():
                weight.is_updated()

    @contextlib.contextmanager
    def there(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, those of these parameters that have a gradient are on the device, and are updated. Where there is no room for
        one, it is updated where it is.
        """
        weights = [self._trained[id(p)] for p in parameters if id(p) in self._trained and gradient_of(p) is not None]
        with self._lock, below_autograd(), unwatched(), contextlib.suppress(torch.OutOfMemoryError):
            for weight in weights:
                self.moved_nbytes += weight.nbytes if weight.is_away else 0
                weight.fetch()
                weight.is_updated()
        for weight in weights:
            weight.users += 1
        try:
            yield
        finally:
            for weight in weights:
                weight.users -= 1
        with self._lock, below_autograd(), unwatched():
            for weight in weights:
                try:
                    self.moved_nbytes += weight.drop()
                except OffloadError as error:
                    self._tell(error)

    # -- the process is forked -----------------------------------------------------------------------

    def fork_begins(self) -> None:
        """What is written to a file later shows in the memory of the forked process: weights of the CPU that are trained, and
        are away, come for the time of the fork.
        """
        self._lock.acquire()
        with below_autograd(), unwatched():
            self._forking = [w for w in self._trained.values() if on_host(w.device) and w.is_away]
            for weight in self._forking:
                weight.fetch()

    def forked(self, is_child: bool) -> None:
        """The forked process parks none: the file is its parent's, too."""
        leaving, self._forking = self._forking, []
        if is_child:
            for unit in self._units.values():
                unit.listening.close()
                unit.disown()
            self._units = {}
            self._trained = {}
            self._in_backward = self._coming = None
        else:
            with below_autograd(), unwatched():
                for weight in leaving:
                    weight.drop()
        self._lock.release()

    # -- a unit runs ---------------------------------------------------------------------------------

    def _called(self, unit: _Unit, original: Any, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        given = nodes_of((args, kwargs)) if unit.in_backward and torch.is_grad_enabled() else None
        self._begins(unit)
        try:
            out = original(*args, **kwargs)
        finally:
            self._ends(unit)
        if given is not None:
            self._before_backward(unit, nodes_of(out) - given)
        return out

    @uncompiled
    def _begins(self, unit: _Unit) -> None:
        with self._lock:
            if backward_task() == -1:
                if self._forward is not None and self._forward[1] == threading.get_ident():
                    pass_fences = self._forward[0]()
                    if pass_fences is not None:
                        pass_fences()
                self._fetch(unit, "forward")
            else:  # a checkpoint runs the module again: its backward follows
                self._backward_in(unit)
            unit.called(1)

    @uncompiled
    def _ends(self, unit: _Unit) -> None:
        with self._lock:
            unit.called(-1)
            if not unit.calls and unit is not self._in_backward:
                self._drop(unit)

    def _drop(self, unit: _Unit, changed: bool = False) -> None:
        try:
            self.moved_nbytes += unit.drop(changed)
        except OffloadError as error:
            self._tell(error)
        if unit.is_lent:
            self._tell("NumPy has the addresses of some (`numpy()`). Copy them first: w.detach().clone().numpy()")

    def _tell(self, why: object) -> None:
        """Say once that weights cannot leave."""
        self._say_once(f"MemOpt: weights that the plan parks stay on the device: {why}", "stay")

    def _fetch(self, unit: _Unit, direction: Direction) -> None:
        if self._coming is not unit:
            self._stop_copying()
        nbytes = unit.away_nbytes
        try:
            unit.fetch()
            following = self._coming = unit.next.get(direction)
            if following is not None:
                following.copy_ahead(self._streams[following.device])
        except BaseException:
            self._stop_copying()
            if not unit.calls:
                self._drop(unit)
            raise
        self.moved_nbytes += nbytes

    @uncompiled
    def _before_backward(self, unit: _Unit, nodes: set[Any]) -> None:
        """The weights come before the first node of the unit runs. `nodes`: of what it returns, not of what it got."""
        for node in nodes:
            node.register_prehook(lambda _: self._backward_in(unit))

    @uncompiled
    def _backward_in(self, unit: _Unit) -> None:
        with self._lock:
            before, self._in_backward = self._in_backward, unit
            if before is unit:
                return
            if before is None:
                queue_callback(partial(self.backward_ended, False))
            elif not before.calls:
                self._drop(before)
            self._fetch(unit, "backward")


_living: weakref.WeakSet[ParkedWeights] = weakref.WeakSet()


def _backward_failed(parked: weakref.ref[ParkedWeights]) -> None:
    weights = parked()
    if weights is not None:
        weights.backward_ended()


def _before_fork() -> None:
    for parked in _living:
        parked.fork_begins()


def _after_fork(is_child: bool) -> None:
    for parked in _living:
        parked.forked(is_child)


os.register_at_fork(before=_before_fork, after_in_parent=partial(_after_fork, False), after_in_child=partial(_after_fork, True))
_placed: weakref.WeakKeyDictionary[nn.Module, ParkedWeights] = weakref.WeakKeyDictionary()
"""Models whose frozen weights were never on the device together (`to_device`)."""


def placed_in(model: nn.Module) -> ParkedWeights | None:
    """The weights of this model that `to_device` has parked."""
    return _placed.get(model)


def parks_of(model: nn.Module) -> ParkedWeights:
    """The same; none at first."""
    return _placed.setdefault(model, ParkedWeights())


def copies_overlap(device: torch.device) -> bool:
    """Whether a device computes while weights are copied to it. On the CPU both are the work of the same cores."""
    return not on_host(device)
