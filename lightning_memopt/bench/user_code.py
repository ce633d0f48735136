"""The user's function that gives a training. What goes wrong in it is told in one line, with the user's file and line."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memopt.errors import ConfigError, MemOptError

if TYPE_CHECKING:
    from lightning_memopt.bench.subject import Training

_FOREIGN = ("<frozen", f"{Path(__file__).parents[1]}{os.sep}", f"{Path(traceback.__file__).parent}{os.sep}")
"""How the files of code begin that is not the user's: the import system, this package, the standard library."""


def function_of(spec: str) -> Callable[[], Any]:
    """The function that `package.module:function` names. Raises ConfigError if there is none."""
    module, _, name = spec.partition(":")
    if not (module and name) or module.startswith("."):
        raise ConfigError(
            f"{spec!r} is neither a file nor package.module:function. Give one of them; the function returns (model, "
            "optimizer, step), and step() runs one whole training step."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    with in_user_code(f"importing {module}", "Give a module that can be imported from here"):
        imported = importlib.import_module(module)
    function = getattr(imported, name, None)
    if not callable(function):
        has = "has no function" if function is None else f"has {type(function).__name__}, not a function,"
        raise ConfigError(f"{spec!r}: {module} {has} {name}. Give the name of a function in it.")
    return function


def builder(spec: str) -> Callable[[], Training]:
    """Calls the function, and gives its `Training`; raises ConfigError if it returns something else.

    Raises ConfigError at once if there is no such function.
    """
    function = function_of(spec)

    def build() -> Training:
        from lightning_memopt.bench.subject import Training

        return Training.of(function(), spec)

    return build


@contextlib.contextmanager
def in_user_code(doing: str, remedy: str = "") -> Iterator[None]:
    """Within, what the user's code raises becomes a ConfigError. `doing`: what runs, as "importing hm"."""
    try:
        yield
    except MemOptError:
        raise
    except (Exception, SystemExit) as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        raised = f"{doing} raised {said.splitlines()[-1]}{_where(error)}"
        raise ConfigError(f"{raised}. {remedy or 'Run it by itself, and correct it'}.") from error


def _where(error: BaseException) -> str:
    """The line of the user's that raised: the innermost one that is of no installed package."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_FOREIGN) and "site-packages" not in f.filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
