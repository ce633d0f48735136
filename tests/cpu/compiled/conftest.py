"""Tests of compiled code."""

import pytest

from tests.cpu.compiled.training import counted


@pytest.fixture
def bytes_are_counted() -> None:
    counted()
