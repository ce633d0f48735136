"""The machine that the tests run on (tests/cpu/lib/machines.py), and where backwards run (tests/cpu/lib/device_thread.py)."""

from __future__ import annotations

import pytest

from tests.cpu.lib.machines import MACHINES, STANDARD, enter


def pytest_addoption(parser: pytest.Parser) -> None:
    where = "made-up machine to run on, see tests/cpu/lib/machines.py"
    parser.addoption("--machine", default=STANDARD, choices=sorted(MACHINES), help=where)
    apart = "backwards run in a thread of their own, as on CUDA, see tests/cpu/lib/device_thread.py"
    parser.addoption("--device-thread", action="store_true", help=apart)


def pytest_configure(config: pytest.Config) -> None:
    enter(config.getoption("machine"))


def pytest_report_header(config: pytest.Config) -> str:
    where = ", backwards in a thread of their own" if config.getoption("device_thread") else ""
    return f"machine: {config.getoption('machine')}{where}"
