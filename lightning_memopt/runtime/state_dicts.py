"""The state of one parameter, as a dict whose tensors come back when they are read, whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_memopt.record import unwatched
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.tiers import Stored


class ParkedState(dict[Any, Any]):
    """The state of one parameter. A tensor that is away has no bytes until somebody reads it.

    away: name of a tensor -> its bytes in the tier.
    coming: name of a tensor that is away and has memory already -> whether its copy back was queued.

    Many methods: each way to read or change a dict.
    """

    __slots__ = ("_read", "away", "coming")

    def __init__(self, state: Any = (), read: Callable[[ParkedState, Any], None] = lambda state, name: None) -> None:
        """`read(self, name)`: a tensor that is away is read, and has its bytes when this returns. Code that makes another dict
        of this type gives none, and gets one in which nothing is away.
        """
        super().__init__(state)
        self.away: dict[Any, Stored] = {}
        self.coming: dict[Any, bool] = {}
        self._read = read

    def plain(self) -> dict[Any, Any]:
        """The same state as a plain dict, with all bytes."""
        for name in tuple(self.away):
            self._read(self, name)
        return dict(dict.items(self))

    def on_host(self) -> dict[Any, Any]:
        """The same state as a plain dict, with copies in the host's memory of what is away, which stays away."""
        return dict(dict.items(self)) | {
            name: _copy_on_host(dict.__getitem__(self, name), self.away[name]) for name in self.away
        }

    def read_by(self, read: Callable[[ParkedState, Any], None]) -> None:
        """From now on, `read` is told of what is read."""
        self._read = read

    def _there(self, name: Any) -> None:
        if name in self.away:
            self._read(self, name)

    def __getitem__(self, name: Any) -> Any:
        self._there(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[Any]:  # only because of it, `dict(state)` and `{**state}` call `__getitem__`
        return super().__iter__()

    def get(self, name: Any, default: Any = None) -> Any:
        self._there(name)
        return super().get(name, default)

    def __setitem__(self, name: Any, value: Any) -> None:
        self._there(name)  # the tensor that is replaced may go on elsewhere
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        self._there(name)
        super().__delitem__(name)

    def setdefault(self, name: Any, default: Any = None) -> Any:
        self._there(name)
        return super().setdefault(name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        self._there(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[Any, Any]:
        self.plain()
        return super().popitem()

    def clear(self) -> None:
        self.plain()
        super().clear()

    def update(self, *others: Any, **more: Any) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value

    def items(self) -> Any:
        return self.plain().items()

    def values(self) -> Any:
        return self.plain().values()

    def copy(self) -> dict[Any, Any]:
        return self.plain()

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self.plain() == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self.plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.plain(),)


def as_it_is(state: dict[Any, Any]) -> dict[Any, Any]:
    """A parameter's state as it is: nothing comes back."""
    return dict(dict.items(state))


def values_of(state: Any) -> list[Any]:
    """The values of a parameter's state as they are: none comes back."""
    return list(dict.values(state)) if isinstance(state, dict) else [state]


def _copy_on_host(t: torch.Tensor, stored: Stored) -> torch.Tensor:
    """A copy of a tensor that is away, in the host's memory."""
    with below_autograd(), unwatched():
        flat = torch.empty(stored.nbytes, dtype=torch.uint8, device=t.device)
        stored.fetch(flat)
        stored.wait_fetched()
        return flat.cpu().view(t.dtype).as_strided(t.size(), t.stride())
