"""Run a function right after a module is imported, or now if it has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook that runs `then` once, after the module `target` was imported."""

    def __init__(self, target: str, then: Callable[[], None]) -> None:
        self.target, self.then = target, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(target: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module `target` has been imported, else once right after its import. May be repeated."""
    if target in sys.modules:
        then()
    elif not any(isinstance(f, _AfterImport) and (f.target, f.then) == (target, then) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(target, then))
