"""A process that ends in the middle of a planned step ends as the plain one: exit code, output, and what it says of errors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cpu.lib.exits import CASES


def _end(how: str, name: str) -> tuple[int, str, str]:
    """(exit code, standard output, the last line of standard error)."""
    command = [sys.executable, "-m", "tests.cpu.lib.exits", how, name]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = process.stderr.splitlines()
    if lines[:1] == ["Traceback (most recent call last):"]:  # our frames are in it
        lines = lines[-1:]
    return process.returncode, process.stdout, "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_a_process_ends_as_the_plain_one(name: str) -> None:
    """Both where the run is closed and where it is left open."""
    with ThreadPoolExecutor(2) as pool:
        plain, closed, left_open = pool.map(_end, ("plain", "planned", "planned"), (name, name, f"{name}+open"))
    assert closed == plain
    assert left_open == plain
