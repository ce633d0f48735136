"""Modules of these tests are small: the engine leaves the recorder for them as it does for larger ones."""

from __future__ import annotations

import pytest

from lightning_memopt.runtime.engine import program


@pytest.fixture(autouse=True)
def leaving_small_modules():
    """The recorder is left for modules of few ops, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_WORTHWHILE", 4)
        yield
