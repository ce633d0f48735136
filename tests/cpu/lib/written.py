"""What the ranks of a group wrote: a module of `tests/cpu/lib` starts them, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.cpu.lib.launched import ROOT, ran

needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo"
)


def written(module: str, folder: Path, *arguments: str, timeout: int, **environment: str) -> dict[str, Any]:
    """The contents of every `FOLDER/NAME.json`, by name, after `python -m tests.cpu.lib.MODULE FOLDER ARGUMENTS` ended well.

    Args:
        timeout: seconds. After them all processes are killed, and the test fails.
    """
    done = ran(f"tests.cpu.lib.{module}", str(folder), *arguments, timeout=timeout, cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def of_ranks(world: int, module: str, folder: Path, *arguments: str, timeout: int) -> list[dict[str, Any]]:
    """As `written`, where rank r writes `FOLDER/r.json`: what each rank wrote."""
    contents = written(module, folder, *arguments, timeout=timeout)
    return [contents[str(rank)] for rank in range(world)]
