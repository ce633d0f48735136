"""Register the strategies without importing Lightning: now if it is loaded, else right after it is imported.

`lightning` and `pytorch_lightning` are the same code under two names, with classes and registries of their own. The strategies
of the one are in `strategies` and `fabric`, those of the other in the same modules below `pytorch_lightning`. Also here: in
which of the two a public name is, and which extra is missing if neither is installed.
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

_TARGETS = {
    "lightning.pytorch": "lightning_memopt.strategies",
    "lightning.fabric": "lightning_memopt.fabric",
    "pytorch_lightning": "lightning_memopt.pytorch_lightning.strategies",
    "lightning_fabric": "lightning_memopt.pytorch_lightning.fabric",
}
"""Package of Lightning -> the package here that registers with it when it is imported."""


def _register(target: str) -> None:
    # the import registers; if it is already running, and itself imports Lightning, it registers when it ends
    try:
        importlib.import_module(_TARGETS[target])
    except ImportError as error:  # `import lightning` must work as it does without this package
        warnings.warn(
            f'MemOpt: the strategies "memopt" and "memopt_ddp" are not registered with {target}: {error}. Install a version '
            "that is tested with lightning-memopt, or use lightning_memopt.optimize.",
            stacklevel=2,
        )


_REGISTRATIONS = {target: partial(_register, target) for target in _TARGETS}


def register_when_loaded() -> None:
    """Register now or when Lightning is imported. The package calls this once, when it is imported itself."""
    for target, register in _REGISTRATIONS.items():
        after_import(target, register)


def public(module: str, name: str) -> Any:
    """The object `name` of a module of this package, for a user who has imported one of the two Lightnings, or none yet.

    Raises MissingExtraError if the module needs a framework that is not installed.
    """
    for_lightning = module in _TARGETS.values() or module == "lightning_memopt.callbacks"
    if for_lightning and (_only("pytorch_lightning", "lightning") or _only("lightning_fabric", "lightning")):
        module = module.replace("lightning_memopt", "lightning_memopt.pytorch_lightning", 1)
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
