"""Plans of these tests are chosen by times that are known beforehand, so none depends on how busy the machine is. A test that
needs a certain plan gives times of its own. Programs that a test starts measure theirs, unless they say otherwise.
"""

from __future__ import annotations

import pytest

from tests.cpu.lib.times import Linked, given

LINK = 1e9
"""Bytes a second. A weight's gradient is copied in less time than the next one is computed in, on one core of a CPU."""


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Linked(LINK))
