"""Notice what user code does without the dispatcher while a forward is recorded (rules R4 and R9).

Raw memory: numpy, ctypes and dlpack can write where no dispatch mode sees it. While a recorder is active, every method that
hands out the memory of a `torch.Tensor` or of its storage tells the recorder first.

Sizes of storages: a storage that is resized loses its content, and no dispatch mode sees it.

Settings that change bits: rebuilds run under the settings that the forward began with. Ops that run under other settings do
not run again.

Saved-tensor hooks: if `torch.func` and others forbid them, torch raises an error if any are entered. Our own hooks are
exempt from this check.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch

from lightning_memopt.record.seams import Listening, Seams
from lightning_memopt.record.settings import CHANGES, SETTERS
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import AUTOGRAD, innermost_hooks, no_dispatch_modes

Watcher = Callable[[torch.Tensor, bool], None]
Resize = Callable[[torch.Tensor], None]
Hook = Callable[[torch.Tensor], object]
Opens = Callable[[torch.UntypedStorage], None]
_silenced = threading.local()
"""`on`: whether listeners hear nothing about raw memory and sizes from this thread now."""


class _Listener(NamedTuple):
    """What one forward listens with.

    exposes: called with a tensor whose memory is about to be handed out, and whether only its address is handed out.
    sets: called after a setting was set.
    hook: the pack hook of the forward.
    opens: called with a storage that somebody reads without a tensor, before a tensor is made on it.
    """

    exposes: Watcher
    sets: Callable[[], None]
    hook: Hook
    opens: Opens


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within, no listener hears about raw memory and sizes from this thread: the package itself reads the memory, or nobody
    else knows it yet.
    """
    before = getattr(_silenced, "on", False)
    _silenced.on = True
    try:
        yield
    finally:
        _silenced.on = before


def _tell(t: torch.Tensor, address: bool) -> None:
    if not getattr(_silenced, "on", False):
        _silenced.on = True  # the listeners themselves may take raw memory
        try:
            for listener in tuple(_forward_seams.listeners):
                listener.exposes(t, address)
        finally:
            _silenced.on = False


def _of_tensor(original: Any) -> Any:
    address = original.__name__ == "data_ptr"

    @uncompiled
    @wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _forward_seams.listeners:
            _tell(self, address)
        return original(self, *args, **kwargs)

    return method


def _of_storage(original: Any) -> Any:
    address = original.__name__ == "data_ptr"

    @uncompiled
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if _forward_seams.listeners and not getattr(_silenced, "on", False):
            _tell(_tensor_on(self), address)
        return original(self, *args, **kwargs)

    return method


def _tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    for listener in tuple(_forward_seams.listeners):
        listener.opens(storage)
    with no_dispatch_modes():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _resizing(original: Any) -> Any:
    @uncompiled
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if not _size_seams.listeners:
            return original(self, *args, **kwargs)
        listeners = () if getattr(_silenced, "on", False) else tuple(_size_seams.listeners)
        for before, _ in listeners:
            before(_tensor_on(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            for _, after in listeners:
                after(_tensor_on(self))

    return method


def _setting(original: Any) -> Any:
    @uncompiled
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            CHANGES.last = object()
            for listener in tuple(_forward_seams.listeners):
                listener.sets()

    return function


def _watched(_: Any) -> bool:
    CHANGES.last = object()  # settings may have been set while nobody watched
    return True


def _forbidding(original: Any) -> Any:
    @uncompiled
    def disable(message: str, fail_if_non_empty: bool = True) -> Any:
        innermost = innermost_hooks(True)
        is_own = innermost is not None and any(innermost[0] is listener.hook for listener in _forward_seams.listeners)
        return original(message, fail_if_non_empty and not is_own)

    return disable


_forward_seams: Seams[_Listener] = Seams(
    lambda: [
        *((torch.Tensor, name, _of_tensor) for name in ("data_ptr", "numpy", "__array__", "__dlpack__")),
        *((torch.UntypedStorage, name, _of_storage) for name in ("data_ptr", "__setitem__", "fill_", "copy_")),
        *((module, "to_dlpack", _of_tensor) for module in (torch, torch.utils.dlpack)),
        *((owner, name, _setting) for owner, name in SETTERS),
        (CHANGES, "watched", _watched),  # behind all setters: installed when they are, and removed before them
        (AUTOGRAD, "_saved_tensors_hooks_disable", _forbidding),
    ],
    stays=True,
)
_size_seams: Seams[tuple[Resize, Resize]] = Seams(lambda: [(torch.UntypedStorage, "resize_", _resizing)], stays=True)


def watching(watcher: Watcher, listener: Callable[[], None], hook: Hook, opens: Opens = lambda storage: None) -> Listening:
    """While this listens, `watcher(t, address)` is called before anybody takes the raw memory of `t`, and `listener()` after
    somebody set one of the settings that change bits.

    `address` is true if only the memory's address is taken, false if an array or a capsule is. Saved-tensor hooks may be
    forbidden while the innermost hook is `hook`, the pack hook of the caller. Where the memory is asked of a storage,
    `opens(storage)` comes first: torch makes no tensor on a storage whose bytes are not there.
    """
    return _forward_seams, _Listener(watcher, listener, hook, opens)


def watching_sizes(before: Resize, after: Resize) -> Listening:
    """While this listens, `before(t)` and `after(t)` are called around each resize of a storage. `t` is a tensor on it."""
    return _size_seams, (before, after)
