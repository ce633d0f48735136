"""The modules of these tests are small: here the engine runs them without the recorder, as it does with larger ones."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_memopt.runtime.engine import program
from lightning_memopt.session.forward.recording import PlannedRecording


@pytest.fixture(autouse=True)
def leaving_small_modules():
    """Modules of few ops run without the recorder, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_WORTHWHILE", 4)
        yield


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """A list that gets each module whose call ends under a plan in which the module may run without the recorder."""
    modules: list[nn.Module] = []
    ends = PlannedRecording._module_ends
    monkeypatch.setattr(PlannedRecording, "_module_ends", lambda self, m: (modules.append(m), ends(self, m)))
    return modules
