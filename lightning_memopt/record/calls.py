"""Learn of calls of modules by a seam that neither compiled code nor a copy of a module reads.

Hooks that are registered for all modules change the guards of dynamo: it would compile every compiled region of the model again
in each step, and give up after a few. The recomputation of such a region in a checkpoint, which runs without our hooks, would
be another graph. The seam is `_compiled_call_impl`, which `nn.Module.__call__` runs where it is not None: only eager calls read
it.

The modules themselves stay as they are. Some classes copy `module.__dict__` in a way of their own (`nn.RNNBase.__getstate__`,
parametrized modules, `__dict__.copy()` of replicas), and with an attribute of ours a copy would run the original. So the
attribute is on the class, and looks up in a table whether this very module has a substitute for its call.
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
"""Identity of a module -> the module, and the function that a call of it runs."""
_seams: dict[type[nn.Module], bool] = {}
"""The classes with a seam, and whether they had an attribute of that name before (only `nn.Module` itself has)."""
_keepers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects for which the seams stay on classes (`keep_seams`)."""


class _Seam:
    """Stands on a class in place of `_compiled_call_impl`; an instance's own attribute (`module.compile()`) stays in force."""

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
    """The function that a call of the module runs when nobody listens to the module."""
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
    """Take the seams off all classes when nobody listens to any module and nobody keeps the seams."""
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
    """Leave the seams on classes until `drop_seams` of the same keeper: Python stops caching attributes of a class that changes
    too often.
    """
    _keepers.add(keeper)


def drop_seams(keeper: object) -> None:
    """Leave the seams no longer for this keeper. May be repeated."""
    _keepers.discard(keeper)
    _sweep()


def _compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled: by `torch.compile(module)`, or by `module.compile()`."""
    return "_orig_mod" in module._modules or module.__dict__.get(CALL) is not None


def eager_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are not inside a compiled module; the compiled modules themselves are among them."""
    modules: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            if not _compiled(module):
                waiting.extend(module.children())
    return list(modules.values())


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model whose calls run compiled, without those inside another compiled module."""
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
            _leave(entered)  # does nothing, unless the first call was interrupted


def instead_of_calls(module: nn.Module, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within, run `call(*args, **kwargs)` in place of every call of the module, compiled or not."""
    return _watching([(module, call)])


def around_calls(modules: Iterable[nn.Module], before: Told, after: Told) -> contextlib.AbstractContextManager[None]:
    """Within, call `before(module)` and `after(module)` around every call of one of `modules`; `after` also if the call raises.

    Modules that are compiled, or that somebody listens to already, are left alone.
    """
    return _watching((m, partial(_call, m, before, after)) for m in modules if m.__dict__.get(CALL) is None)
