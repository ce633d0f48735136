"""Keep PyTorch training within a memory budget: optimal recomputation plans, executed with bit-identical gradients.

`optimize(model, optimizer, budget="8GiB")` is for plain loops, `MemOptStrategy(budget="8GiB")` for Lightning. Importing this
package registers the Lightning strategy "memopt" as soon as Lightning is imported too. The planning modules need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports a name when it is first used
    from lightning_memopt.callbacks import MemOptBatchScaler, MemOptMonitor
    from lightning_memopt.config import MemOptConfig
    from lightning_memopt.errors import InfeasibleError, MemOptError
    from lightning_memopt.integrations.batch_size import find_max_batch_size
    from lightning_memopt.integrations.plain import Run, optimize
    from lightning_memopt.plan import Plan
    from lightning_memopt.record import Rule, register_op
    from lightning_memopt.session import RunStatus, Session
    from lightning_memopt.strategies import MemOptMixin, MemOptModelParallelStrategy, MemOptStrategy
    from lightning_memopt.telemetry import Meter

__version__ = "0.1.0"

_PUBLIC = {
    "InfeasibleError": "lightning_memopt.errors",
    "MemOptBatchScaler": "lightning_memopt.callbacks",
    "MemOptConfig": "lightning_memopt.config",
    "MemOptError": "lightning_memopt.errors",
    "MemOptMixin": "lightning_memopt.strategies",
    "MemOptMonitor": "lightning_memopt.callbacks",
    "MemOptModelParallelStrategy": "lightning_memopt.strategies",
    "MemOptStrategy": "lightning_memopt.strategies",
    "Meter": "lightning_memopt.telemetry",
    "Plan": "lightning_memopt.plan",
    "Rule": "lightning_memopt.record",
    "Run": "lightning_memopt.integrations.plain",
    "RunStatus": "lightning_memopt.session",
    "Session": "lightning_memopt.session",
    "find_max_batch_size": "lightning_memopt.integrations.batch_size",
    "optimize": "lightning_memopt.integrations.plain",
    "register_op": "lightning_memopt.record",
}

__all__ = [
    "InfeasibleError",
    "MemOptBatchScaler",
    "MemOptConfig",
    "MemOptError",
    "MemOptMixin",
    "MemOptMonitor",
    "MemOptModelParallelStrategy",
    "MemOptStrategy",
    "Meter",
    "Plan",
    "Rule",
    "Run",
    "RunStatus",
    "Session",
    "__version__",
    "find_max_batch_size",
    "optimize",
    "register_op",
]


if not TYPE_CHECKING:  # a type checker would accept every name of a module that has `__getattr__`

    def __getattr__(name: str) -> Any:
        module = _PUBLIC.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)


def _register_strategy() -> None:
    from lightning_memopt._registration import register_when_loaded

    register_when_loaded()


_register_strategy()
