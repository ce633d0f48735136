"""Know the module in which an op runs, as `path#call` (without `#call` for the first call), and the ops of each call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident

from torch import nn

from lightning_memopt.record import around_calls, eager_modules


def _none() -> None:
    """No ops are counted."""


class Scopes:
    """The model's modules whose forward is running, by thread, and the ops that ran in each. Ops are counted in the thread that
    called `tracking`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(m): name for name, m in model.named_modules()}
        self._model = weakref.ref(model)
        self._stacks: dict[int, list[tuple[str, int | None]]] = {}
        """Thread -> (calls that are running in it, as `path#call`; number of ops that ran before each)."""
        self._calls: dict[str, int] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        """Call of the last forward that is over -> (its first op, the op after its last)."""
        self._ops: Callable[[], int | None] = _none
        self._thread = get_ident()

    def current(self) -> str:
        """The innermost module whose forward is running; "" if there is none."""
        stack = self._stacks.get(get_ident())
        return stack[-1][0] if stack else ""

    @property
    def unbroken(self) -> dict[str, tuple[int, int]]:
        """Modules that were called once in the last forward: path -> (their first op, the op after their last)."""
        again = {call.partition("#")[0] for call in self._spans if "#" in call}
        once = (call for call in self._spans if call and "#" not in call and call not in again)
        return {path: self._spans[path] for path in once if self._spans[path][0] < self._spans[path][1]}

    def _enter(self, module: nn.Module) -> None:
        name = self._names.get(id(module), "")
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._stacks.setdefault(get_ident(), []).append((f"{name}#{call}" if call else name, self._ops()))

    def _leave(self, module: nn.Module) -> None:
        thread = get_ident()
        if stack := self._stacks.get(thread):
            (call, first), end = stack.pop(), self._ops()
            if first is not None and end is not None and thread == self._thread:
                self._spans[call] = first, end

    @contextlib.contextmanager
    def tracking(self, ops: Callable[[], int | None] = _none) -> Iterator[None]:
        """Keep the stack up to date inside this block. `ops`: returns the number of the forward's ops so far; None after it."""
        model = self._model()
        self._ops, self._thread = ops, get_ident()
        self._spans = {}
        try:
            with around_calls(eager_modules(model) if model is not None else (), self._enter, self._leave):
                yield
        finally:
            self._ops = _none
            self._stacks.clear()
            self._calls.clear()
