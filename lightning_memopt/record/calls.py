"""Be told when modules are called, by a seam that neither compiled code nor a copy of a module looks at.

Hooks that are registered for all modules change what dynamo guards on: every compiled region of the model would be compiled
again in every step, and after a few times no more. Its recomputation in a checkpoint, which comes without our hooks, would be
another graph. `_compiled_call_impl`, which `nn.Module.__call__` runs where it is not None, is read by eager calls alone.

The modules themselves are left as they are: what is in `module.__dict__` ends up in every copy that a class makes in a way of
its own (`nn.RNNBase.__getstate__`, parametrized modules, `__dict__.copy()` of replicas), and the copy would run the original.
The attribute is put on their class, and looks up in a table whether this very module is watched.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself

CALL = "_compiled_call_impl"
Told = Callable[[nn.Module], None]
_lock = threading.RLock()
_watched: dict[int, tuple[nn.Module, Callable[..., Any]]] = {}
"""By identity: a module, and what a call of it runs."""
_seams: dict[type[nn.Module], bool] = {}
"""The classes with a seam, and whether they had an attribute of that name before (only `nn.Module` itself has)."""
_keepers: weakref.WeakSet[Any] = weakref.WeakSet()


class _Seam:
    """In the place of `_compiled_call_impl` on a class; what instances have of their own (`module.compile()`) stays theirs."""

    @uncompiled
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return None
        entry = _watched.get(id(module))
        return module.__dict__.get(CALL) if entry is None else entry[1]

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        if CALL not in module.__dict__:
            raise AttributeError(CALL)
        del module.__dict__[CALL]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # where a class is pickled by value: None, as on `nn.Module`


_SEAM = _Seam()


@uncompiled
def unwatched_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module runs when nobody watches it."""
    own = module.__dict__.get(CALL)
    return module._call_impl if own is None else own


def _watch(module: nn.Module, call: Callable[..., Any]) -> None:
    cls = type(module)
    with _lock:
        if not any(base in _seams for base in cls.__mro__):
            _seams[cls] = CALL in vars(cls)
            setattr(cls, CALL, _SEAM)
        _watched[id(module)] = module, call


def _sweep() -> None:
    """Take the seams off where nobody watches, and nobody will."""
    with _lock:
        while _seams and not _watched and not _keepers:
            cls, own = next(iter(_seams.items()))
            if vars(cls).get(CALL) is _SEAM:
                if own:
                    setattr(cls, CALL, None)
                else:
                    delattr(cls, CALL)
            del _seams[cls]


def keep_seams(keeper: object) -> None:
    """Leave them on classes until `drop_seams` of the same keeper: Python caches nothing of a class that changes too often."""
    _keepers.add(keeper)


def drop_seams(keeper: object) -> None:
    """End what `keep_seams` began. May be repeated."""
    _keepers.discard(keeper)
    _sweep()


def _compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled: by `torch.compile(module)`, or by `module.compile()`."""
    return "_orig_mod" in module._modules or module.__dict__.get(CALL) is not None


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


@uncompiled
def _tell(told: Told, module: nn.Module) -> None:
    told(module)


@uncompiled_itself
def _call(module: nn.Module, before: Told, after: Told, *args: Any, **kwargs: Any) -> Any:
    _tell(before, module)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        _tell(after, module)


def _leave(entered: list[nn.Module]) -> None:
    while entered:
        _watched.pop(id(entered[-1]), None)
        entered.pop()
    _sweep()


@contextlib.contextmanager
def _watching(calls: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    entered: list[nn.Module] = []
    try:
        for module, call in calls:
            if id(module) not in _watched:
                entered.append(module)
                _watch(module, call)
        yield
    finally:
        try:
            _leave(entered)
        finally:
            _leave(entered)  # does nothing, unless the first was interrupted


def instead_of_calls(module: nn.Module, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Run `call(*args, **kwargs)` for every call of the module, compiled or not, on whose exit all is as before."""
    return _watching([(module, call)])


def around_calls(modules: Iterable[nn.Module], before: Told, after: Told) -> contextlib.AbstractContextManager[None]:
    """Call `before` and `after` around every call of one of `modules`, on every exit; compiled ones, and those that are watched
    already, are left alone."""
    return _watching((m, partial(_call, m, before, after)) for m in modules if m.__dict__.get(CALL) is None)
