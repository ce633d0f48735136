"""What `make check` runs finds nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
CHECKS = re.findall(r"^\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0], re.M)
"""Commands of the target, without the folder of the environment."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (BIN / "memopt").exists(), reason="not an environment that `make setup` made"),
]


def test_they_are_known() -> None:
    assert [check.split()[0] for check in CHECKS] == ["ruff", "mypy", "lint-imports"]


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_found(check: str) -> None:
    name, *arguments = check.split()
    done = subprocess.run([str(BIN / name), *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
