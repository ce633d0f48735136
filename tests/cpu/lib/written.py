"""What the ranks of a group wrote: a module of `tests/cpu/lib` starts them, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.cpu.lib.launched import ROOT, ran
from tests.cpu.lib.scripts import Interpreter

needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo"
)


def written(
    module: str, folder: Path, *arguments: str, timeout: int, by: Interpreter | None = None, **environment: str
) -> dict[str, Any]:
    """The contents of every `FOLDER/NAME.json`, by name, after `python -m tests.cpu.lib.MODULE FOLDER ARGUMENTS` ended well.

    Args:
        timeout: seconds. After them all processes are killed, and the test fails.
        by: has the imports already, or makes them for the modules to come. It has an environment of its own.
    """
    name = f"tests.cpu.lib.{module}"
    if by is None:
        done = ran(name, str(folder), *arguments, timeout=timeout, cwd=ROOT, **environment)
    else:
        done = by.run("-m", name, str(folder), *arguments, cwd=ROOT, needs=(name,), seconds=timeout)
    assert done.returncode == 0, done.stderr[-5000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def of_ranks(
    world: int, module: str, folder: Path, *arguments: str, timeout: int, by: Interpreter | None = None
) -> list[dict[str, Any]]:
    """As `written`, where rank r writes `FOLDER/r.json`: what each rank wrote."""
    contents = written(module, folder, *arguments, timeout=timeout, by=by)
    return [contents[str(rank)] for rank in range(world)]
