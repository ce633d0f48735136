"""Tell listeners of calls of modules, by a seam that neither compiled code nor a copy of a module reads.

Global module hooks would not do: they change the guards of dynamo, which would compile every compiled region of the model
again in each step, and give up after a few. And a checkpoint would recompute such a region without our hooks, as another graph.
The seam is `_compiled_call_impl` instead. `nn.Module.__call__` runs it if it is not None, and only eager calls read it.

The modules themselves are not changed. Some classes copy `module.__dict__` in their own way (`nn.RNNBase.__getstate__`,
parametrized modules, `__dict__.copy()` of replicas). If we set an attribute on a module, its copy would run the original
module. So the attribute is on the class, and looks up in a table whether this very module has a substitute for its call.

`torch.compile(module)` returns a wrapper. For a module of torch.nn itself it compiles the whole call, and compiled code does
not read the seam. So a call of the wrapper counts as a call of the module that it wraps.

`beneath_calls` lasts as long as a run. Listeners that come for one forward wrap its calls, and notice no difference.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_memopt.record.seams import are_kept, at_drops
from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself
from lightning_memopt.torch_private import wrapper_class

CALL = "_compiled_call_impl"
Told = Callable[[nn.Module], None]


class _Watched(NamedTuple):
    """A module whose calls are seen.

    call: what a call of it runs.
    instead: the function given to `instead_of_calls`; None if only calls of the module itself are seen.
    """

    module: nn.Module
    call: Callable[..., Any]
    instead: Callable[..., Any] | None


class _Entry(NamedTuple):
    """What a call of a module runs: `call(original, module, name, ...)`.

    shares: other callers of `beneath_calls` may watch the module, too.
    """

    weak: weakref.ref[nn.Module]
    name: str
    call: Callable[..., Any]
    shares: bool


_lock = threading.RLock()
_watched: dict[int, _Watched] = {}
"""Identity of a module -> the module."""
_entries: dict[int, tuple[_Entry, ...]] = {}
"""Identity of a module whose calls are seen by `beneath_calls` -> what a call of it runs, from the inside.

The module may be freed meanwhile.
"""
_innermost: dict[int, _Watched] = {}
"""Identity of a module -> the module, of those whose calls are seen by `around_innermost`."""
_seams: dict[type[nn.Module], bool] = {}
"""The classes with a seam, and whether they had an attribute of that name before (only `nn.Module` itself has)."""
_often: Counter[type[nn.Module]] = Counter()
"""Class -> how often a seam was put on it since the first of the runs that are open now began."""
_CHANGES = 16
"""A seam that was put on a class this many times stays there until no run is open (seams.py)."""


@uncompiled
def _entries_of(module: nn.Module) -> tuple[_Entry, ...]:
    entries = _entries.get(id(module), ())
    return entries if entries and entries[0].weak() is module else ()  # else a module that was freed had this identity


class _Seam:
    """The `_compiled_call_impl` of a class with a seam. An instance's own attribute (`module.compile()`) stays in force."""

    @uncompiled
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return None
        watched = _watched.get(id(module))
        if watched is not None:
            return watched.call
        entries = _entries_of(module) if _entries else ()
        if entries:
            return partial(_entered, module, entries)
        return unwatched_call(module) if id(module) in _innermost else module.__dict__.get(CALL)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        if CALL not in module.__dict__:
            raise AttributeError(CALL)
        del module.__dict__[CALL]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # if a class is pickled by value: None, as on `nn.Module`


class _SeamOfWrappers(_Seam):
    """The seam on the class of the wrappers that `torch.compile(module)` returns."""

    @uncompiled
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is not None and id(module) not in _watched:
            wrapped = _watched.get(id(module.__dict__.get("_modules", {}).get("_orig_mod")))
            if wrapped is not None and wrapped.instead is not None:
                return partial(wrapped.instead, unwatched_call(module))
        return super().__get__(module, owner)


_SEAM, _SEAM_OF_WRAPPERS = _Seam(), _SeamOfWrappers()


@uncompiled
def unwatched_call(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of the module runs when nobody listens to the module."""
    own = module.__dict__.get(CALL)
    call = module._call_impl if own is None else own
    inner = _innermost.get(id(module)) if _innermost else None
    return call if inner is None else partial(inner.call, call)


@uncompiled
def _beneath(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of the module runs for listeners that come for one forward."""
    entries = _entries_of(module) if _entries else ()
    return partial(_entered, module, entries) if entries else unwatched_call(module)


def _put_seam(cls: type[nn.Module]) -> None:
    if _seams.keys().isdisjoint(cls.__mro__):
        _seams[cls] = CALL in vars(cls)
        if are_kept():
            _often[cls] += 1
        setattr(cls, CALL, _SEAM)


def _watch(watched: _Watched) -> None:
    cls, wrappers = type(watched.module), wrapper_class()
    with _lock:
        if wrappers is not None and wrappers not in _seams and (watched.instead is not None or cls is wrappers):
            _seams[wrappers] = CALL in vars(wrappers)
            setattr(wrappers, CALL, _SEAM_OF_WRAPPERS)
        _put_seam(cls)
        _watched[id(watched.module)] = watched


def _sweep(left: Iterable[type[nn.Module]]) -> None:
    """Take the seams off those of the classes of which no module has a listener any more."""
    with _lock:
        idle = {base for cls in left for base in cls.__mro__ if base in _seams}
        if are_kept():
            idle = {cls for cls in idle if _often[cls] < _CHANGES}
        if not idle:
            return
        entered = (entries[0].weak() for entries in _entries.values())
        watched = (each.module for each in (*_watched.values(), *_innermost.values()))
        for module in (*watched, *(m for m in entered if m is not None)):
            idle.discard(next(base for base in type(module).__mro__ if base in _seams))
        wrappers = wrapper_class()
        if _watched:
            idle.discard(wrappers)
        elif wrappers in _seams:
            idle.add(wrappers)
        for cls in idle:
            if isinstance(vars(cls).get(CALL), _Seam):
                if _seams[cls]:
                    setattr(cls, CALL, None)
                else:
                    delattr(cls, CALL)
            del _seams[cls]


def _runs_closed() -> None:
    if not are_kept():
        _often.clear()
    _sweep(tuple(_seams))


at_drops(_runs_closed)


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
        return _beneath(module)(*args, **kwargs)
    finally:
        _tell(after, module)


def _leave(entered: list[nn.Module], classes: set[type[nn.Module]]) -> None:
    while entered:
        _watched.pop(id(entered[-1]), None)
        entered.pop()
    _sweep(classes)


@contextlib.contextmanager
def _watching(calls: Iterable[_Watched]) -> Iterator[None]:
    entered: list[nn.Module] = []
    classes: set[type[nn.Module]] = set()
    try:
        for watched in calls:
            if id(watched.module) not in _watched:
                entered.append(watched.module)
                classes.add(type(watched.module))
                _watch(watched)
        yield
    finally:
        try:
            _leave(entered, classes)
        finally:
            _leave(entered, classes)  # does nothing, unless the first call was interrupted


@uncompiled_itself
def _instead(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(_beneath(module), *args, **kwargs)


@uncompiled_itself
def _entered(module: nn.Module, entries: tuple[_Entry, ...], *args: Any, **kwargs: Any) -> Any:
    call = unwatched_call(module)
    for entry in entries:
        call = partial(entry.call, call, module, entry.name)
    return call(*args, **kwargs)


def instead_of_calls(module: nn.Module, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within, run `call(original, *args, **kwargs)` instead of every call of the module, compiled or not.

    original: the function that the call would have run. If the wrapper of `torch.compile(module)` is called, it is its
        function, which may call the module itself once more.
    """
    return _watching([_Watched(module, partial(_instead, module, call), call)])


def around_calls(modules: Iterable[nn.Module], before: Told, after: Told) -> contextlib.AbstractContextManager[None]:
    """Within, call `before(module)` and `after(module)` around every call of one of `modules`; `after` also if the call raises.

    Modules that are compiled, or that have a listener already, are left alone.
    """
    eager = (m for m in modules if m.__dict__.get(CALL) is None)
    return _watching(_Watched(m, partial(_call, m, before, after), None) for m in eager)


@uncompiled_itself
def _around(module: nn.Module, before: Told, after: Told, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _tell(before, module)
    try:
        return call(*args, **kwargs)
    finally:
        _tell(after, module)


def _leave_innermost(module: nn.Module) -> None:
    with _lock:
        _innermost.pop(id(module), None)
    _sweep([type(module)])


@contextlib.contextmanager
def around_innermost(module: nn.Module, before: Told, after: Told) -> Iterator[None]:
    """Like `around_calls` for one module, which may have other listeners, too: they begin before and end after this one."""
    watched = _Watched(module, partial(_around, module, before, after), None)
    try:
        with _lock:
            _put_seam(type(module))
            _innermost[id(module)] = watched
        yield
    finally:
        try:
            _leave_innermost(module)
        finally:
            _leave_innermost(module)  # does nothing, unless the first call was interrupted


def _enter(module: nn.Module, name: str, call: Callable[..., Any], shares: bool) -> None:
    with _lock:
        others = _entries_of(module)
        if shares or all(entry.shares for entry in others):
            _put_seam(type(module))
            _entries[id(module)] = (*others, _Entry(weakref.ref(module), name, call, shares))


def _leave_entries(call: Callable[..., Any] | None) -> None:
    """Forget this call, and the calls for modules that were freed: they may hold much memory."""
    with _lock:
        for key, entries in tuple(_entries.items()):
            others = tuple(entry for entry in entries if entry.call is not call and entry.weak() is not None)
            if others:
                _entries[key] = others
            else:
                _entries.pop(key, None)
    _sweep(tuple(_seams))


@contextlib.contextmanager
def beneath_calls(modules: dict[str, nn.Module], call: Callable[..., Any], shares: bool = False) -> Iterator[None]:
    """Within, run `call(original, module, name, *args, **kwargs)` instead of every call of one of `modules` (name -> module).
    Listeners of the other functions wrap this call, and may come and go meanwhile.

    original: as for `instead_of_calls`.
    modules: emptied, because no module is kept alive. Modules that another caller of this function watches are left alone.
    shares: they are not; our call runs that of the other caller. Nor are they left alone by a later caller.
    """
    _leave_entries(None)
    try:
        while modules:
            name, module = modules.popitem()
            _enter(module, name, call, shares)
            del module
        yield
    finally:
        try:
            _leave_entries(call)
        finally:
            _leave_entries(call)  # does nothing, unless the first call was interrupted
