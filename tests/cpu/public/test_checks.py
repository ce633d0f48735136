"""What `make check` runs finds nothing."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from test_makefile import BIN, ROOT, recipe

CHECKS = recipe("check")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (BIN / "memopt").exists(), reason="not an environment that `make setup` made"),
]


def test_they_are_known() -> None:
    assert [check.removeprefix(f"{BIN}/").split()[0] for check in CHECKS] == ["ruff", "mypy", "lint-imports"]


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_found(check: str) -> None:
    done = subprocess.run(shlex.split(check), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
