"""Calls of single modules of a model. They are the forwards of code that trains without calling the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_memopt.record import beneath_calls, eager_modules
from lightning_memopt.torch_private import fsdp_units

Call = Callable[..., Any]


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the module gets a gradient. If not (a metric, a frozen teacher), its call begins no forward."""
    return any(p.requires_grad for p in module.parameters())


class Entries:
    """While watching, runs `call(original, module, name, *args, **kwargs)` instead of every call of a module of the model,
    other than the model itself. This takes two or three microseconds a call, so it is not done where the model itself is
    called.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._model, self._call = model, call
        self._watched: contextlib.ExitStack | None = None

    def watch(self, wanted: bool) -> None:
        """Begin or end watching. May be repeated."""
        if not wanted or fsdp_units(self._model):  # sharded modules gather their weights in calls of the model
            if self._watched is not None:
                self.close()
        elif self._watched is None:
            eager = set(map(id, eager_modules(self._model)))
            modules = {name: m for name, m in self._model.named_modules() if name and id(m) in eager}
            self._watched = contextlib.ExitStack()
            self._watched.enter_context(beneath_calls(modules, self._call))

    def close(self) -> None:
        """End watching."""
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()
