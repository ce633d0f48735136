"""Which module an op runs in: `path#call`, by global module hooks that leave nothing on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Scopes:
    """The stack of modules whose forward is running. `current()` names the innermost one of the watched model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(m): name for name, m in model.named_modules()}
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}

    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            self._stack.append(f"{name}#{call}" if call else name)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._names.get(id(module)) is not None and self._stack:
            self._stack.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        pre = register_module_forward_pre_hook(self._enter)
        post = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            pre.remove()
            post.remove()
            self._stack.clear()
            self._calls.clear()
