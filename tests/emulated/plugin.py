"""A plugin of pytest: the process's CUDA device is the emulated one (pytest -p tests.emulated.plugin).

Tests that cannot be judged there are skipped, each with a reason, and a run in which accesses to memory were not ordered fails.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.emulated import device

ONLY = {
    "test_allocator_cuda.py": "bytes",
    "test_batch_size_cuda.py": "bytes",
    "test_frontier_cuda.py": "bytes",
    "test_away_cuda.py": "bits",
    "test_codecs_cuda.py": "bits",
    "test_exact_cuda.py": "bits",
    "test_convolutions_cuda.py": "bits",
    "test_in_backward_cuda.py": "bits",
    "test_loop_cuda.py": "bits",
    "test_pool_cuda.py": "bits",
    "test_sweeps_cuda.py": "bits",
    "test_tiers_cuda.py": "bits",
}
"""By the file of tests: the mode in which it can be judged. In bytes mode all values are equal; in bits mode, models of the
benchmarks take hours.
"""
NOWHERE = {
    "test_energy_cuda.py": "nothing measures energy on the emulated device",
    "test_rates_of_this_machine": "times are virtual on the emulated device",
    "test_copies_and_waits_are_timed_between_events": "times are virtual on the emulated device",
    "test_a_captured_graph_beside_the_pool": "a captured graph repeats copies alone on the emulated device",
}
"""By a part of the test's name: why it cannot be judged in any mode."""


def pytest_configure(config: pytest.Config) -> None:
    if not device.is_emulated():
        raise pytest.UsageError("this needs the emulated device: make emulated")


def pytest_report_header(config: pytest.Config) -> str:
    return f"device: emulated, {device.mode()} mode"


def _reasons(name: str) -> Iterator[str]:
    yield from (reason for part, reason in NOWHERE.items() if part in name)
    yield from (f"judged in {mode} mode" for part, mode in ONLY.items() if part in name and mode != device.mode())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for reason in _reasons(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup() -> None:
    gc.collect()  # plain training leaves cycles that hold the model, and tests count what is allocated


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if device.races() and not exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if device.races():
        terminalreporter.write_line(f"{device.races()} accesses to memory of the device were not ordered: see stderr", red=True)
