"""The machine that the tests run on: see tests/cpu/lib/machines.py."""

from __future__ import annotations

import pytest

from tests.cpu.lib.machines import MACHINES, STANDARD, enter


def pytest_addoption(parser: pytest.Parser) -> None:
    where = "made-up machine to run on, see tests/cpu/lib/machines.py"
    parser.addoption("--machine", default=STANDARD, choices=sorted(MACHINES), help=where)


def pytest_configure(config: pytest.Config) -> None:
    enter(config.getoption("machine"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"machine: {config.getoption('machine')}"
