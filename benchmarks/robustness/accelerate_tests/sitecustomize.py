"""In every Python process: what `Accelerator.prepare` returns trains within a plan. For the tests and scripts of Accelerate.

    git clone .../accelerate && cd accelerate
    MEMOPT_BUDGET=min PYTHONPATH=.../benchmarks/robustness/accelerate_tests:src python -m pytest .../tests/test_accelerator.py

Python imports a module of this name by itself. MEMOPT_BUDGET is the budget; without it nothing is changed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

_open = contextlib.ExitStack()
"""Runs of the last Accelerator: they end when the next one is made."""


def _within_plans(accelerator: Any) -> None:
    prepare, make = accelerator.prepare, accelerator.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _open.close()
        make(self, *args, **kwargs)

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        from lightning_memopt import optimize

        result = prepare(self, *args, **kwargs)
        parts = result if isinstance(result, tuple) else (result,)
        models = [p for p in parts if isinstance(p, torch.nn.Module) and any(q.requires_grad for q in p.parameters())]
        optimizers = [p.optimizer for p in parts if isinstance(p, torch.optim.Optimizer)]
        if len(models) == 1 and optimizers:
            options: dict[str, Any] = {"budget": os.environ["MEMOPT_BUDGET"], "profile_steps": 1, "verbose": False}
            _open.enter_context(optimize(models[0], optimizers, **options))
        return result

    accelerator.__init__, accelerator.prepare = made, prepared


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the Accelerator when its module is imported: Accelerate itself would be too much for every process."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "accelerate.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _within_plans(module.Accelerator)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "MEMOPT_BUDGET" in os.environ:
    sys.meta_path.insert(0, _Finder())
