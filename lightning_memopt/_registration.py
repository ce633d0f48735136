"""Register the strategies without importing Lightning: now if it is loaded, else right after it is imported.

`lightning` and `pytorch_lightning` are the same code under two names, each with its own classes and registries. This module
also decides for which of the two a public name is, and which extra is missing if neither is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from functools import partial
from typing import Any

from lightning_memopt.after_import import after_import
from lightning_memopt.errors import EXTRAS, MissingExtraError
from lightning_memopt.integrations.lightnings import PACKAGES, register


def _register(target: str) -> None:
    try:
        register(target)
    except ImportError as error:  # `import lightning` must work as it does without this package
        warnings.warn(
            f'MemOpt: the strategies "memopt" and "memopt_ddp" are not registered with {target}: {error}. Install a version '
            "that is tested with lightning-memopt, or use lightning_memopt.optimize.",
            stacklevel=2,
        )


_REGISTRATIONS = {target: partial(_register, target) for packages in PACKAGES.values() for target in packages}


def register_when_loaded() -> None:
    """Register now or when Lightning is imported. The package calls this once, when it is imported itself."""
    for target, then in _REGISTRATIONS.items():
        after_import(target, then)


def public(module: str, name: str) -> Any:
    """The object `name` of a module of this package, for a user who has imported one of the two Lightnings, or none yet.

    Raises MissingExtraError if the module needs a framework that is not installed.
    """
    if module in PACKAGES and (_only("pytorch_lightning", "lightning") or _only("lightning_fabric", "lightning")):
        module = "lightning_memopt.pytorch_lightning"
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        framework = (error.name or "").partition(".")[0]
        if framework not in EXTRAS:
            raise
        raise MissingExtraError(
            f"{name} needs {framework}, which is not installed: pip install 'lightning-memopt[{EXTRAS[framework]}]'.",
            name=framework,
        ) from error


def _only(wanted: str, other: str) -> bool:
    """Whether the user has the first package and not the second: has imported it, or else has installed it."""
    if wanted in sys.modules or other in sys.modules:
        return other not in sys.modules
    return importlib.util.find_spec(other) is None and importlib.util.find_spec(wanted) is not None
