"""Notice when somebody takes a tensor's raw memory while a forward is recorded (Rule 4).

numpy, ctypes and dlpack can write where no dispatch mode sees it. While a recorder is active, `data_ptr`, `numpy`,
`__array__` and `__dlpack__` of `torch.Tensor` tell it first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NAMES = ("data_ptr", "numpy", "__array__", "__dlpack__")
_lock = threading.Lock()
_watchers: list[Callable[[torch.Tensor], None]] = []
_originals: dict[str, tuple[bool, Any]] = {}
_busy = threading.local()


def _patched(original: Any) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_busy, "on", False):
            _busy.on = True
            try:
                for watcher in tuple(_watchers):
                    watcher(self)
            finally:
                _busy.on = False
        return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def watching(watcher: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `watcher(t)` before anybody gets at the raw memory of `t`. The methods are put back when nobody watches."""
    with _lock:
        if not _watchers:
            for name in _NAMES:
                own = name in torch.Tensor.__dict__
                original = getattr(torch.Tensor, name)
                _originals[name] = (own, original)
                setattr(torch.Tensor, name, _patched(original))
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                for name, (own, original) in _originals.items():
                    if own:
                        setattr(torch.Tensor, name, original)
                    else:
                        delattr(torch.Tensor, name)
                _originals.clear()
