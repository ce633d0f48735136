"""The native engine: parts of the runtime in C++, as a Python module that is built on first use and cached.

It has the state of a step, which Python sees as attributes of objects: what is held (version.h), handles (handle.h), progress,
the map of storages. So state has one owner, and either engine can take over at any op. Python records every op, is always
right, and runs alone where the module cannot be built.

`install` builds and loads the module, once per process; `MEMOPT_NATIVE=0` switches it off. `loaded()` returns it, or None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_memopt import cxx
from lightning_memopt.native.build import TORCH, command, parts

T = TypeVar("T")
_SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
_lock = threading.Lock()
_tried = False
_module: Any = None


def loaded() -> Any:
    """The module if `install` has loaded it, else None. module.cpp has its functions."""
    return _module


def hiding() -> Callable[[T], T]:
    """A function that hides an object from the garbage collector, and returns it. Without the module it only returns it.

    Only for objects that cannot be part of a reference cycle. An observed step makes ten such objects per op. Each costs the
    collector two microseconds, because many new objects make it visit all objects of the process.
    """
    return _shown if _module is None else _module.untrack


def maker(kind: type[T]) -> Callable[..., T]:
    """A function that makes an object of a dataclass with slots from all its values in order, and hides it like `hiding`."""
    if _module is not None:
        return partial(_module.row, kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not fields[0].kw_only:
        return kind
    names = [field.name for field in fields]
    return lambda *values: kind(**dict(zip(names, values, strict=True)))


def _shown(thing: T) -> T:
    return thing


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Within, the Python engine runs although the module is loaded, to compare the two. For the whole process."""
    global _module
    module, _module = _module, None
    try:
        yield
    finally:
        _module = module


def install(say: Callable[[str], None], prepare: Callable[[Any], None]) -> None:
    """Build and load the module, once per process, and call `prepare(module)`. If that is impossible, one line says why.

    prepare: tells the module what it needs, and tests it. Raises BuildError if the test fails.
    """
    global _module, _tried
    with _lock:
        if _tried or os.environ.get("MEMOPT_NATIVE") == "0":
            return
        _tried = True
        try:
            module = _load(library(say))
            prepare(module)
        except cxx.BuildError as error:
            say(f"MemOpt: the native engine is not there: {error}. Python runs instead: slower, with the same results.")
            return
        _module = module


def library(say: Callable[[str], None]) -> Path:
    """The path of the module, which is built first if it is missing or damaged. Raises BuildError."""
    return cxx.library("engine", "the native engine", _parts(), _compile, say)


def _load(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("engine", str(path))
    spec = importlib.util.spec_from_loader("engine", loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise cxx.BuildError(f"{path} cannot be loaded ({error})") from None
    return module


def _parts() -> tuple[str, ...]:
    """Everything that the module depends on, except the compiler."""
    return (*parts(_SOURCES), sys.version)


def _headers() -> str:
    """The folder of Python's headers. Raises BuildError if they are not installed."""
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        raise cxx.BuildError(f"Python's headers are not in {folder} (install python3-dev)")
    return folder


def _compile(compiler: str, target: Path) -> None:
    folders = TORCH / "include/torch/csrc/api/include", _headers()
    linked = "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"
    whole = [source for source in _SOURCES if source.name == "all.cpp"]
    # otherwise pybind11 checks at each reference count whether this thread has the interpreter's lock
    options = "-fvisibility=hidden", "-DPYBIND11_NO_ASSERT_GIL_HELD_INCREF_DECREF", *(f"-I{folder}" for folder in folders)
    cxx.run(command(compiler, whole, linked, target, options))
