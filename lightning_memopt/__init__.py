"""Keep PyTorch training within a memory budget: optimal recomputation plans, executed with bit-identical gradients.

`optimize(model, optimizer, budget="8GiB")` for plain loops, `MemOptStrategy(budget="8GiB")` for Lightning. Importing the
package registers the Lightning strategy "memopt" when Lightning is (or gets) imported by it; planning needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "MemOptBatchScaler": "lightning_memopt.callbacks",
    "MemOptConfig": "lightning_memopt.config",
    "MemOptMonitor": "lightning_memopt.callbacks",
    "MemOptStrategy": "lightning_memopt.strategies",
    "MemOptError": "lightning_memopt.errors",
    "Session": "lightning_memopt.session",
    "find_max_batch_size": "lightning_memopt.integrations.batch_size",
    "optimize": "lightning_memopt.integrations.plain",
    "register_op": "lightning_memopt.record",
}

__all__ = [
    "MemOptBatchScaler",
    "MemOptConfig",
    "MemOptError",
    "MemOptMonitor",
    "MemOptStrategy",
    "Session",
    "__version__",
    "find_max_batch_size",
    "optimize",
    "register_op",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def _announce() -> None:
    from lightning_memopt._registration import register_when_loaded

    register_when_loaded()


_announce()
