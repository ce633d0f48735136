"""A plugin of pytest: the process's CUDA device is the emulated one (pytest -p tests.emulated.plugin)."""

from __future__ import annotations

import pytest

from tests.emulated import device


def pytest_configure(config: pytest.Config) -> None:
    if not device.is_emulated():
        raise pytest.UsageError("this needs the emulated device: make emulated")


def pytest_report_header(config: pytest.Config) -> str:
    return f"device: emulated, {'bits' if device.is_bits() else 'bytes'} mode"
