"""The clock that the tests of meters move themselves."""

from __future__ import annotations

import pytest

from tests.cpu.lib.fake_nvml import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
