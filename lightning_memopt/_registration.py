"""Register the Lightning strategy without importing Lightning: now if it is loaded, else right after it is imported."""

from __future__ import annotations

import importlib

from lightning_memopt.after_import import after_import


def _register() -> None:
    # the import registers; if it is already running, and itself imports Lightning, it registers when it ends
    importlib.import_module("lightning_memopt.strategies")


def register_when_loaded() -> None:
    """Register now or when Lightning is imported. The package calls this once, when it is imported itself."""
    after_import("lightning.pytorch", _register)
