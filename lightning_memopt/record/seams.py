"""Seams: functions of torch that are wrapped while there is a listener, and restored when there is none.

Most wrappers do nothing without a listener. These stay, once installed, until the last run is closed: each change of a class
attribute clears what Python has cached for the class, and Python stops caching a class that changes too often.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any, Generic, TypeVar

from lightning_memopt.record.undoing import Calls, undo

L = TypeVar("L")
Patch = tuple[Any, str, Callable[[Any], Any]]
"""(owner, name of its attribute, function that makes the wrapper of the original)."""

_keepers: set[weakref.ref[object]] = set()
"""The open runs. While there are any, seams that may stay are left installed."""
_sweeps: list[Callable[[], None]] = []
"""Called when a run is closed."""


def keep_seams(keeper: object) -> None:
    """Leave seams that may stay installed until `drop_seams(keeper)`, or until the keeper is freed."""
    _keepers.add(weakref.ref(keeper, _keepers.discard))


def drop_seams(keeper: object) -> None:
    """This keeper needs the seams no longer. May be repeated."""
    _keepers.discard(weakref.ref(keeper))
    for sweep in _sweeps:
        sweep()


def are_kept() -> bool:
    """Whether seams that may stay are left installed."""
    return bool(_keepers)


def at_drops(sweep: Callable[[], None]) -> None:
    """Call `sweep()` after each `drop_seams`."""
    _sweeps.append(sweep)


class Seams(Generic[L]):
    """Wrappers that are installed when the first listener comes, and removed when the last one leaves.

    listeners: the listeners, in the order in which they came. It is always the same list: wrappers read it, and only `enter`
        and `leave` change it.
    """

    def __init__(self, patches: Callable[[], Iterable[Patch]], stays: bool = False) -> None:
        """`patches`: returns the attributes to wrap. It is called once, when the first listener comes, because an owner may be
        in a module of torch that takes long to import. Attributes that the installed torch does not have are left out.

        stays: without a listener the wrappers behave like the originals, so they are removed only when no run is open any more.
        """
        self._patches = patches
        self._stays = stays
        self._known: list[Patch] | None = None
        self.listeners: list[L] = []
        self._lock = threading.Lock()
        self._installed: list[tuple[Any, str, bool, Any, Any]] = []
        """(owner, name, whether the owner itself had the attribute, original, wrapper), in the order of installation."""
        if stays:
            at_drops(self._sweep)

    def listening(self, listener: L) -> contextlib.AbstractContextManager[None]:
        """Within, `listener` is one of the listeners."""
        return listening_to([(self, listener)])

    def enter(self, listener: L) -> None:
        """Add a listener. Call `leave` even if this is interrupted."""
        with self._lock:
            self.listeners.append(listener)
            if len(self.listeners) > 1:
                return
            if self._known is not None and len(self._installed) >= len(self._known):
                owners, names, _, _, wrappers = zip(*self._installed, strict=True) if self._installed else ((),) * 5
                if all(map(is_, map(getattr, owners, names), wrappers)):  # else user code has replaced one meanwhile
                    return
            self._install()

    def leave(self, listener: L) -> None:
        """Remove a listener. May be repeated."""
        with self._lock:
            if listener in self.listeners:
                self.listeners.remove(listener)
            if not (self.listeners or (self._stays and _keepers)):
                self._restore()

    def _sweep(self) -> None:
        with self._lock:
            if not (self.listeners or _keepers):
                self._restore()

    def _install(self) -> None:
        """Install the wrappers that are not installed now."""
        if self._known is None:
            self._known = [patch for patch in self._patches() if hasattr(patch[0], patch[1])]
        installed = {id(wrapper) for *_, wrapper in self._installed}
        for owner, name, wrap in self._known:
            original = getattr(owner, name)
            if id(original) in installed:
                continue
            wrapper = wrap(original)
            own = isinstance(owner, ModuleType) or name in vars(owner)  # torch's settings modules hide attributes from `vars`
            self._installed.append((owner, name, own, original, wrapper))  # before the change: it may be interrupted
            setattr(owner, name, wrapper)

    def _restore(self) -> None:
        while self._installed:
            owner, name, own, original, wrapper = self._installed[-1]
            if getattr(owner, name, None) is wrapper:  # else user code has replaced it meanwhile
                if own:
                    setattr(owner, name, original)
                elif name in vars(owner):
                    delattr(owner, name)
            self._installed.pop()


Listening = tuple[Seams[Any], Any]
"""(seams, a listener to add to them)."""


@contextlib.contextmanager
def listening_to(all: Iterable[Listening]) -> Iterator[None]:
    """Within, each of these listeners is one of the listeners of its seams."""
    entered: Calls = []
    try:
        for seams, listener in all:
            entered.append(partial(seams.leave, listener))
            seams.enter(listener)
        yield
    finally:
        undo(entered)
