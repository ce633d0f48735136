"""Notice when Python code reads gradients of parameters: clipping, logging, the user's own code.

`Parameter.grad` is a property while there is a listener. Autograd and kernels do not read gradients through Python, so their
reads are not seen.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_memopt.record import uncompiled

Told = Callable[[torch.Tensor], None]
_GRAD: Any = torch.Tensor.grad
_lock = threading.RLock()
_listeners: list[Told] = []


@uncompiled
def _read(p: torch.Tensor) -> torch.Tensor | None:
    for told in tuple(_listeners):
        told(p)
    return _GRAD.__get__(p)


@uncompiled
def _write(p: torch.Tensor, value: torch.Tensor | None) -> None:
    _GRAD.__set__(p, value)


@uncompiled
def _delete(p: torch.Tensor) -> None:
    _GRAD.__delete__(p)


_SEAM = property(_read, _write, _delete)


def _settle() -> None:
    tensor = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there are no sharded parameters
    with _lock:
        for cls in (nn.Parameter, getattr(tensor, "DTensor", nn.Parameter)):  # a sharded parameter is only of the second class
            if _listeners:
                cls.grad = _SEAM
            elif vars(cls).get("grad") is _SEAM:
                del cls.grad


@contextlib.contextmanager
def reads_of_gradients(told: Told) -> Iterator[None]:
    """Within, call `told(p)` before the gradient of any parameter `p` is read. Its exceptions are raised to the reader."""
    try:
        _listeners.append(told)
        _settle()
        yield
    finally:
        try:
            if told in _listeners:
                _listeners.remove(told)
        finally:
            _settle()
