"""Notice what user code does below or beside the dispatcher while a forward is recorded (rules R4 and R9).

Raw memory: numpy, ctypes and dlpack can write where no dispatch mode sees it. While a recorder is active, what hands out the
memory of a `torch.Tensor` or of its storage tells it first.

Sizes of storages: a storage that is resized loses what it held, and torch tells no dispatch mode.

Settings that change bits: rebuilds run under those that the forward began with; ops that run under others do not run again.

Saved-tensor hooks: `torch.func` and others forbid them, and torch refuses to while any are entered. Ours step aside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_memopt.record.settings import SETTERS
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import AUTOGRAD, innermost_hooks, no_dispatch_modes

Watcher = Callable[[torch.Tensor, bool], None]
Resize = Callable[[torch.Tensor], None]
Hook = Callable[[torch.Tensor], object]
_TENSOR = ("data_ptr", "numpy", "__array__", "__dlpack__")
_STORAGE = ("data_ptr", "__setitem__", "fill_", "copy_")
_lock = threading.Lock()
_watchers: list[Watcher] = []
_listeners: list[Callable[[], None]] = []
_hooks: list[Hook] = []
_resized: list[tuple[Resize, Resize]] = []
_originals: list[tuple[Any, str, bool, Any]] = []
_sizes: list[tuple[Any, str, bool, Any]] = []
_busy = threading.local()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Where we take raw memory ourselves, in order to read it, or before anybody else knows it."""
    before = getattr(_busy, "on", False)
    _busy.on = True
    try:
        yield
    finally:
        _busy.on = before


def _tell(t: torch.Tensor, address: bool) -> None:
    if not getattr(_busy, "on", False):
        _busy.on = True
        try:
            for watcher in tuple(_watchers):
                watcher(t, address)
        finally:
            _busy.on = False


def _of_tensor(original: Any) -> Any:
    address = original.__name__ == "data_ptr"

    @uncompiled
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _tell(self, address)
        return original(self, *args, **kwargs)

    return method


def _of_storage(original: Any) -> Any:
    address = original.__name__ == "data_ptr"

    @uncompiled
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_busy, "on", False):
            _tell(_on(self), address)
        return original(self, *args, **kwargs)

    return method


def _on(storage: torch.UntypedStorage) -> torch.Tensor:
    with no_dispatch_modes():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _resizing(original: Any) -> Any:
    @uncompiled
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        told = tuple(_resized)
        for before, _ in told:
            before(_on(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            for _, after in told:
                after(_on(self))

    return method


def _setting(original: Any) -> Any:
    @uncompiled
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            for listener in tuple(_listeners):
                listener()

    return function


def _forbidding(original: Any) -> Any:
    @uncompiled
    def disable(message: str, fail_if_non_empty: bool = True) -> Any:
        top = innermost_hooks(False)
        ours = top is not None and any(top[0] is hook for hook in _hooks)
        return original(message, fail_if_non_empty and not ours)

    return disable


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any], originals: list[Any] = _originals) -> None:
    original = getattr(owner, name)
    wrapped = wrap(original)
    originals.append((owner, name, name in vars(owner), original))
    setattr(owner, name, wrapped)


def _install() -> None:
    for name in _TENSOR:
        _replace(torch.Tensor, name, _of_tensor)
    for name in _STORAGE:
        _replace(torch.UntypedStorage, name, _of_storage)
    for module in (torch, torch.utils.dlpack):
        _replace(module, "to_dlpack", _of_tensor)
    for owner, name in SETTERS:
        if hasattr(owner, name):  # not every version of torch has all of them
            _replace(owner, name, _setting)
    _replace(AUTOGRAD, "_saved_tensors_hooks_disable", _forbidding)


def _restore(originals: list[Any] = _originals) -> None:
    while originals:
        owner, name, own, original = originals[-1]
        if own:
            setattr(owner, name, original)
        elif name in vars(owner):
            delattr(owner, name)
        originals.pop()


@contextlib.contextmanager
def watching(watcher: Watcher, listener: Callable[[], None], hook: Hook) -> Iterator[None]:
    """Call `watcher(t, address)` before anybody gets at the raw memory of `t`, by its mere address or as an array, and
    `listener()` after somebody set one of the settings that change bits. Saved-tensor hooks may be forbidden while `hook`, our
    own pack hook, is the innermost. Everything is put back when nobody watches.
    """
    try:
        with _lock:
            _watchers.append(watcher)
            _listeners.append(listener)
            _hooks.append(hook)
            if len(_watchers) == 1:
                _install()
        yield
    finally:
        with _lock:
            if watcher in _watchers:
                _watchers.remove(watcher)
            if listener in _listeners:
                _listeners.remove(listener)
            if hook in _hooks:
                _hooks.remove(hook)
            if not _watchers:
                try:
                    _restore()
                finally:
                    _restore()  # does nothing, unless the first was interrupted


@contextlib.contextmanager
def watching_sizes(before: Resize, after: Resize) -> Iterator[None]:
    """Call `before(t)` and `after(t)` around every resize of a storage, with a tensor on it. Everything is put back when nobody
    watches.
    """
    told = (before, after)
    try:
        with _lock:
            _resized.append(told)
            if len(_resized) == 1:
                _replace(torch.UntypedStorage, "resize_", _resizing, _sizes)
        yield
    finally:
        with _lock:
            if told in _resized:
                _resized.remove(told)
            if not _resized:
                try:
                    _restore(_sizes)
                finally:
                    _restore(_sizes)  # does nothing, unless the first was interrupted
