"""Names of torch that make tensors on a CUDA device, without calls that a function mode sees: `torch.cuda.FloatTensor(2, 3)`,
`torch.load(path, map_location="cuda")`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from lightning_memopt.torch_private import default_device

if TYPE_CHECKING:
    from lightning_memopt.fitting.unfilled import Unfilled

_TYPES = {
    f"{name}Tensor": getattr(torch, f"{name}Tensor")
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
}


class CardType(type):
    """A type of tensors on a CUDA device: `torch.cuda.FloatTensor`.

    host: the type of the same tensors on the host.
    """

    host: Any
    mode: Unfilled

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.host(*args, **kwargs)
        cls.mode.moves(made)
        return made

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.host) and cls.mode.is_on_device(value)


def host_type(kind: Any) -> Any:
    """The type on the host of a type on a card, or of its name; None for all others."""
    if isinstance(kind, CardType):
        return kind.host
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        return _TYPES.get(kind.rpartition(".")[2])
    return None


@contextlib.contextmanager
def card_types(mode: Unfilled) -> Iterator[None]:
    """Within, these names make tensors on the host, and tell `mode` that they would be on the card."""
    loads = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_moved = isinstance(map_location, (str, torch.device)) and str(map_location).startswith("cuda")
        if not callable(map_location):  # files say on which device a tensor was
            map_location = "cpu" if is_moved else _as_it_is
        made = loads(f, map_location, *args, **kwargs)
        if is_moved:
            mode.moves(made)
        return made

    with contextlib.ExitStack() as stack:
        for name, host in _TYPES.items():
            made = CardType(name, (), {"host": host, "mode": mode})
            stack.enter_context(mock.patch(f"torch.cuda.{name}", made))
        stack.enter_context(mock.patch.object(torch, "load", load))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "cuda", _as_it_is))
        stack.enter_context(mock.patch.object(torch, "set_default_tensor_type", _by_default(torch.set_default_tensor_type)))
        before = default_device()
        try:
            yield
        finally:
            if default_device() != before:
                torch.set_default_device(before)


def _as_it_is(storage: Any, *where: Any, **named: Any) -> Any:
    return storage


def _by_default(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_default_tensor_type(kind: Any) -> None:
        host = host_type(kind)
        original(host or kind)
        torch.set_default_device("cuda" if host else None)

    return set_default_tensor_type
