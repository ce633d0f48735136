"""Which parameters of a model are trained, asked in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

_WALK_EVERY = 32
"""Number of calls after which the modules are visited in any case."""
_values: Callable[[Any], Iterable[Any]] = methodcaller("values")  # the tables of a compiled module are not dicts


class Parameters:
    """The parameters of a model, in the order of `model.parameters()`. One that two modules share is listed twice.

    Each step asks which of them are trained. Visiting a thousand modules takes a millisecond, so this is done again only if a
    module has other submodules than before, and once in a while in case a whole table was replaced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._asked = 0
        self._walk()

    def _walk(self) -> None:
        modules = list(self._model.modules())
        tables = [table for module in modules for table in (module._modules, module._parameters)]
        self._empty = [table for table in tables if not table]
        self._children = [module._modules for module in modules if module._modules]
        self._registered = [module._parameters for module in modules if module._parameters]
        self._held = list(chain.from_iterable(map(_values, self._children)))

    def _changed(self) -> bool:
        held = list(chain.from_iterable(map(_values, self._children)))
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        return not same or any(self._empty) or self._asked % _WALK_EVERY == 0

    def trained(self) -> tuple[bool, ...]:
        """For each parameter, whether it requires a gradient."""
        self._asked += 1
        if self._changed():
            self._walk()
        return tuple([p.requires_grad for registered in self._registered for p in registered.values() if p is not None])

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter that `trained` last saw; None if there are no parameters."""
        for registered in self._registered:
            for p in registered.values():
                if p is not None:
                    device: torch.device = p.device
                    return device
        return None
