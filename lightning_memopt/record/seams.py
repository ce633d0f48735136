"""Seams: functions of torch that are wrapped while somebody listens, and put back when the last listener leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Generic, TypeVar

L = TypeVar("L")
Place = tuple[Any, str, Callable[[Any], Any]]
"""(owner, name of its attribute, function that makes the wrapper of the original)."""


class Seams(Generic[L]):
    """Wrappers that are installed when the first listener comes, and removed when the last one leaves.

    listeners: the listeners, in the order in which they came. Wrappers read them; only `listening` changes them.
    """

    def __init__(self, places: Callable[[], Iterable[Place]]) -> None:
        """`places`: gives the attributes that are wrapped. It is called once, when the first listener comes: an owner may be in
        a module of torch that takes long to import. Attributes that the installed torch does not have are left out.
        """
        self._places = places
        self._known: list[Place] | None = None
        self.listeners: list[L] = []
        self._lock = threading.Lock()
        self._originals: list[tuple[Any, str, bool, Any]] = []
        """(owner, name, whether the owner itself had the attribute, original), in the order of installation."""

    @contextlib.contextmanager
    def listening(self, listener: L) -> Iterator[None]:
        """Within, `listener` is one of the listeners."""
        try:
            with self._lock:
                self.listeners.append(listener)
                if len(self.listeners) == 1:
                    self._install()
            yield
        finally:
            try:
                self._leave(listener)
            except BaseException:  # an interrupt
                self._leave(listener)
                raise

    def _leave(self, listener: L) -> None:
        with self._lock:
            if listener in self.listeners:
                self.listeners.remove(listener)
            if not self.listeners:
                self._restore()

    def _install(self) -> None:
        if self._known is None:
            self._known = [place for place in self._places() if hasattr(place[0], place[1])]
        for owner, name, wrap in self._known:
            original = getattr(owner, name)
            wrapper = wrap(original)
            own = isinstance(owner, ModuleType) or name in vars(owner)  # torch's modules of settings do not show what they have
            self._originals.append((owner, name, own, original))  # before the change: it may be interrupted
            setattr(owner, name, wrapper)

    def _restore(self) -> None:
        while self._originals:
            owner, name, own, original = self._originals[-1]
            if own:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)
            self._originals.pop()
