"""In every Python process: what `Accelerator.prepare` returns trains within a plan. For the tests and scripts of Accelerate.

    git clone .../accelerate && cd accelerate
    MEMOPT_BUDGET=min PYTHONPATH=.../benchmarks/robustness/accelerate_tests:src python -m pytest .../tests/test_accelerator.py

Python imports a module of this name by itself. MEMOPT_BUDGET is the budget; without it nothing is changed. The file MEMOPT_LOG
gets a line for each run that ends: the phase that it was in.
"""

from __future__ import annotations

import os


def _watch() -> None:
    from lightning_memopt import MemOptConfig
    from lightning_memopt.integrations import accelerate
    from lightning_memopt.integrations.plain import Run

    accelerate.watch(MemOptConfig(budget=os.environ["MEMOPT_BUDGET"], profile_steps=1, verbose=False))
    log = os.environ.get("MEMOPT_LOG")
    if log is None:
        return
    close = Run.close

    def closed(run: Run) -> None:
        close(run)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{run.status().phase}\n")

    Run.close = closed  # type: ignore[method-assign]


if "MEMOPT_BUDGET" in os.environ:
    from lightning_memopt.after_import import after_import

    after_import("accelerate.accelerator", _watch)
