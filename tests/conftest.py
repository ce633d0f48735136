"""The machine that the tests run on (tests/cpu/lib/machines.py), where backwards run (tests/cpu/lib/device_thread.py), and
which tests are `exhaustive` (exhaustive.txt).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.lib.machines import MACHINES, STANDARD, enter

EXHAUSTIVE = Path(__file__).with_name("exhaustive.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    where = "made-up machine to run on, see tests/cpu/lib/machines.py"
    parser.addoption("--machine", default=STANDARD, choices=sorted(MACHINES), help=where)
    apart = "backwards run in a thread of their own, as on CUDA, see tests/cpu/lib/device_thread.py"
    parser.addoption("--device-thread", action="store_true", help=apart)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive: more of what quicker tests check; `make test-exhaustive` runs these alone")
    enter(config.getoption("machine"))


def exhaustive() -> list[str]:
    """Files, tests and cases that take half a minute of two cores each, and check on more models, processes or compilers what
    others check on few.
    """
    return EXHAUSTIVE.read_text().splitlines()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = set(exhaustive())
    for item in items:
        path, _, name = item.nodeid.partition("::")
        if not names.isdisjoint((path, f"{path}::{name.partition('[')[0]}", item.nodeid)):
            item.add_marker("exhaustive")


def pytest_report_header(config: pytest.Config) -> str:
    where = ", backwards in a thread of their own" if config.getoption("device_thread") else ""
    return f"machine: {config.getoption('machine')}{where}"
