"""The module in which an op runs, as `path#call`; `#call` is left out for the first call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch import nn

from lightning_memopt.record import around_calls, eager_modules


class Scopes:
    """The stack of the model's modules whose forward is running."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(m): name for name, m in model.named_modules()}
        self._model = weakref.ref(model)
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}

    def current(self) -> str:
        """The innermost module whose forward is running; "" if there is none."""
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module) -> None:
        name = self._names.get(id(module), "")
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._stack.append(f"{name}#{call}" if call else name)

    def _leave(self, module: nn.Module) -> None:
        if self._stack:
            self._stack.pop()

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Keep the stack up to date inside this block."""
        model = self._model()
        try:
            with around_calls(eager_modules(model) if model is not None else (), self._enter, self._leave):
                yield
        finally:
            self._stack.clear()
            self._calls.clear()
