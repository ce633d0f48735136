"""A process that ends in the middle of a planned step ends as the plain one: exit code, output, and what it says of errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.lib.exits import CASES

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="no fork"), pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every process printed, and its exit code."""
    folder = tmp_path_factory.mktemp("exits")
    done = subprocess.run([sys.executable, "-m", "tests.cpu.lib.exits", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def _end(folder: Path, process: str) -> tuple[int, str, str]:
    """(exit code, standard output, the last line of standard error)."""
    code, out, err = ((folder / f"{process}.{what}").read_text() for what in ("code", "out", "err"))
    lines = err.splitlines()
    if lines[:1] == ["Traceback (most recent call last):"]:  # our frames are in it
        lines = lines[-1:]
    return int(code), out, "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_a_process_ends_as_the_plain_one(folder: Path, name: str) -> None:
    """Both where the run is closed and where it is left open."""
    plain = _end(folder, f"plain.{name}")
    assert plain[1], "it trained up to the end"
    assert _end(folder, f"planned.{name}") == plain
    assert _end(folder, f"planned.{name}+open") == plain
