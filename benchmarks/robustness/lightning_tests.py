"""A pytest plugin: every Trainer of Lightning's own tests that trains on one device, or with DDP, does so within a plan.

    git clone -b 2.6.5 .../pytorch-lightning && cd pytorch-lightning/tests
    MEMOPT_BUDGET=min PYTHONPATH=... python -m pytest -p benchmarks.robustness.lightning_tests tests_pytorch/trainer

MEMOPT_BUDGET is the budget; without it nothing is changed. What failed, and why, is in docs/measurements/other_projects.md.
With MEMOPT_COUNTS, the name of a file, each strategy appends a line when it is torn down: its class, the number of
processes, and the phase in which its session ended. With MEMOPT_FORK=1 processes are forked where a test asks for spawned
ones, with a budget and without: a spawned process imports everything again, which takes most of the time of such a test.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import lightning.pytorch.strategies as strategies
import lightning.pytorch.trainer.connectors.accelerator_connector as connector

from lightning_memopt import MemOptDDPStrategy, MemOptStrategy

_BUDGET = os.environ.get("MEMOPT_BUDGET")
_COUNTS = os.environ.get("MEMOPT_COUNTS")
_OPTIONS: dict[str, Any] = {"budget": _BUDGET, "profile_steps": 1, "verbose": False}
_POSITIONAL = [name for name in inspect.signature(strategies.DDPStrategy.__init__).parameters if name != "self"]


class _Counted:
    """Appends a line to the file that MEMOPT_COUNTS names."""

    def teardown(self) -> None:
        super().teardown()  # type: ignore[misc]
        session = self.session  # type: ignore[attr-defined]
        if _COUNTS is not None and session is not None:
            processes = getattr(self, "world_size", 1)
            with open(_COUNTS, "a") as counts:
                counts.write(f"{type(self).__name__} {processes} {session.status().phase}\n")


class OneDevice(_Counted, MemOptStrategy):
    """Stands for `SingleDeviceStrategy`."""

    def __init__(self, device: Any) -> None:
        super().__init__(device=device, **_OPTIONS)


class DDP(_Counted, MemOptDDPStrategy):
    """Stands for `DDPStrategy`, with its positional arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_OPTIONS, **dict(zip(_POSITIONAL, args, strict=False)), **kwargs)


def pytest_configure(config: Any) -> None:
    for entry in strategies.StrategyRegistry.values():
        if os.environ.get("MEMOPT_FORK") and entry["init_params"].get("start_method") == "spawn":
            entry["init_params"]["start_method"] = "fork"
        if _BUDGET is not None and entry["strategy"] is strategies.DDPStrategy:
            entry["strategy"] = DDP
    if _BUDGET is not None:
        connector.SingleDeviceStrategy = OneDevice  # type: ignore[assignment,misc]
        strategies.DDPStrategy = DDP  # type: ignore[assignment,misc]  # tests that make one import it after this
