"""What the tests of early updates count."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.cpu.lib.early import counted
from tests.cpu.lib.times import Known


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return counted(monkeypatch)


@pytest.fixture(autouse=True)
def free_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early updates take no time, so that plans of "auto", too, update all parameters early that may be."""
    monkeypatch.setattr(Known, "of_early_update", lambda self, measure: 0.0)
