"""Be told when modules are called, by a seam that compiled code does not look at.

Hooks that are registered for all modules change what dynamo guards on: every compiled region of the model would be compiled
again in every step, and after a few times no more. Its recomputation in a checkpoint, which comes without our hooks, would be
another graph. `_compiled_call_impl` of an instance is read by eager calls alone, and torch keeps it out of copies and pickles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

CALL = "_compiled_call_impl"
Told = Callable[[nn.Module], None]


def _compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled: by `torch.compile(module)`, or by `module.compile()`."""
    call = module.__dict__.get(CALL)
    return "_orig_mod" in module._modules or (call is not None and getattr(call, "compiled", True))


def eager_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are not inside of a compiled one; that is among them."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if not _compiled(module):
                waiting.extend(module.children())
    return list(found.values())


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model whose calls run compiled, without those that are inside of another one."""
    return [module for module in eager_modules(model) if _compiled(module)]


def _call(module: nn.Module, before: Told, after: Told, *args: Any, **kwargs: Any) -> Any:
    before(module)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        after(module)


def _leave(entered: list[nn.Module]) -> None:
    while entered:
        entered[-1].__dict__.pop(CALL, None)
        entered.pop()


@contextlib.contextmanager
def around_calls(modules: Iterable[nn.Module], before: Told, after: Told) -> Iterator[None]:
    """Call `before` and `after` around every call of one of `modules`, on every exit; compiled ones are left alone."""
    entered: list[nn.Module] = []
    try:
        for module in modules:
            if module.__dict__.get(CALL) is None:
                entered.append(module)
                module.__dict__[CALL] = partial(_call, module, before, after)
        yield
    finally:
        try:
            _leave(entered)
        finally:
            _leave(entered)  # does nothing, unless the first was interrupted
