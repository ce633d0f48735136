"""Keep PyTorch training within a memory budget: optimal recomputation plans, executed with bit-identical gradients.

`optimize(model, optimizer, budget="8GiB")` is for plain loops, `MemOptStrategy(budget="8GiB")` for Lightning's Trainer,
`MemOptFabricStrategy(budget="8GiB")` for Fabric. Importing this package registers the strategy "memopt" as soon as Lightning is
imported too. The planning modules need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import lightning_memopt.clocks  # noqa: F401 - before a script replaces a clock of `time`

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports a name when it is first used
    from lightning_memopt.callbacks.batch_scaler import MemOptBatchScaler
    from lightning_memopt.callbacks.monitor import MemOptMonitor
    from lightning_memopt.callbacks.upgrade import MemOptCallback
    from lightning_memopt.config import MemOptConfig
    from lightning_memopt.errors import InfeasibleError, MemOptError, MissingExtraError
    from lightning_memopt.fabric.strategies import MemOptFabricDDPStrategy, MemOptFabricStrategy
    from lightning_memopt.fitting.answer import Fit, fit
    from lightning_memopt.integrations.batch_size import find_max_batch_size
    from lightning_memopt.integrations.plain import Run, optimize
    from lightning_memopt.integrations.to_device import to_device
    from lightning_memopt.integrations.transformers import MemOptTrainerCallback
    from lightning_memopt.plan import Plan
    from lightning_memopt.record import Rule, register_op, register_optimizer
    from lightning_memopt.session import RunStatus, Session
    from lightning_memopt.strategies import MemOptMixin
    from lightning_memopt.strategies.strategies import MemOptDDPStrategy, MemOptModelParallelStrategy, MemOptStrategy
    from lightning_memopt.telemetry import Meter

__version__ = "0.1.0"

_PUBLIC = {
    "Fit": "lightning_memopt.fitting.answer",
    "InfeasibleError": "lightning_memopt.errors",
    "MemOptBatchScaler": "lightning_memopt.lightning",
    "MemOptConfig": "lightning_memopt.config",
    "MemOptCallback": "lightning_memopt.lightning",
    "MemOptDDPStrategy": "lightning_memopt.lightning",
    "MemOptError": "lightning_memopt.errors",
    "MemOptFabricDDPStrategy": "lightning_memopt.lightning",
    "MemOptFabricStrategy": "lightning_memopt.lightning",
    "MemOptMixin": "lightning_memopt.lightning",
    "MemOptMonitor": "lightning_memopt.lightning",
    "MemOptModelParallelStrategy": "lightning_memopt.lightning",
    "MemOptStrategy": "lightning_memopt.lightning",
    "MissingExtraError": "lightning_memopt.errors",
    "MemOptTrainerCallback": "lightning_memopt.integrations.transformers",
    "Meter": "lightning_memopt.telemetry",
    "Plan": "lightning_memopt.plan",
    "Rule": "lightning_memopt.record",
    "Run": "lightning_memopt.integrations.plain",
    "RunStatus": "lightning_memopt.session",
    "Session": "lightning_memopt.session",
    "fit": "lightning_memopt.fitting.answer",
    "find_max_batch_size": "lightning_memopt.integrations.batch_size",
    "optimize": "lightning_memopt.integrations.plain",
    "register_op": "lightning_memopt.record",
    "register_optimizer": "lightning_memopt.record",
    "to_device": "lightning_memopt.integrations.to_device",
}

__all__ = [
    "Fit",
    "InfeasibleError",
    "MemOptBatchScaler",
    "MemOptCallback",
    "MemOptConfig",
    "MemOptDDPStrategy",
    "MemOptError",
    "MemOptFabricDDPStrategy",
    "MemOptFabricStrategy",
    "MemOptMixin",
    "MemOptMonitor",
    "MemOptModelParallelStrategy",
    "MemOptStrategy",
    "MissingExtraError",
    "MemOptTrainerCallback",
    "Meter",
    "Plan",
    "Rule",
    "Run",
    "RunStatus",
    "Session",
    "__version__",
    "fit",
    "find_max_batch_size",
    "optimize",
    "register_op",
    "register_optimizer",
    "to_device",
]


if not TYPE_CHECKING:  # a type checker would accept every name of a module that has `__getattr__`

    def __getattr__(name: str) -> Any:
        if name == "accelerate":  # a module, for `lightning_memopt.accelerate.prepare`
            return importlib.import_module(f"{__name__}.{name}")
        module = _PUBLIC.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_memopt._registration import public

        return public(module, name)


def _register_strategy() -> None:
    from lightning_memopt._registration import register_when_loaded

    register_when_loaded()


_register_strategy()
