"""No run of a test is open in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.lib.loops import installed


@pytest.fixture(autouse=True)
def no_run_is_open() -> Iterator[None]:
    pytest.importorskip("accelerate")
    from lightning_memopt.integrations import accelerate as front

    before = installed()
    yield
    front.end()
    front._process.always = None
    assert installed() == before
