"""Register the Lightning strategy without importing Lightning: now if it is loaded, else right after it is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_TARGET = "lightning.pytorch"


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook that runs the registration once, after `_TARGET` was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # the import registers; if it is already running, and itself imports Lightning, it registers when it ends
    importlib.import_module("lightning_memopt.strategies")


def register_when_loaded() -> None:
    """Register now or when Lightning is imported. The package calls this once, when it is imported itself."""
    if _TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
