"""What the tests of early updates count."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.cpu.lib.early import counted


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return counted(monkeypatch)
