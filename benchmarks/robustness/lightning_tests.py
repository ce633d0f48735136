"""A pytest plugin: every Trainer of Lightning's own tests that would train on one device does so within a plan.

    git clone -b 2.6.5 .../pytorch-lightning && cd pytorch-lightning/tests
    MEMOPT_BUDGET=min PYTHONPATH=... python -m pytest -p benchmarks.robustness.lightning_tests tests_pytorch/trainer

MEMOPT_BUDGET is the budget; without it nothing is changed. What failed, and why, is in docs/measurements.md.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch.trainer.connectors.accelerator_connector as connector

from lightning_memopt import MemOptStrategy


def pytest_configure(config: Any) -> None:
    budget = os.environ.get("MEMOPT_BUDGET")
    if budget is not None:
        made = lambda device: MemOptStrategy(device=device, budget=budget, profile_steps=1, verbose=False)  # noqa: E731
        connector.SingleDeviceStrategy = made  # type: ignore[assignment,misc]
