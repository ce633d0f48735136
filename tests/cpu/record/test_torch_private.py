"""Private names of torch stand in one file, and the installed torch has all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_memopt
from lightning_memopt import torch_private
from lightning_memopt.errors import UnsupportedError

PRIVATE = re.compile(r"(?<!`)\btorch(?!\.ops)(\.\w+)*\._(?!_)\w+")
PACKAGE = Path(lightning_memopt.__file__).parent


def test_the_installed_torch_has_every_private_name() -> None:
    assert torch_private.missing() == [], f"torch {torch.__version__} lacks these"


def test_a_missing_name_says_so_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_MISSING", [])
    absent: Any = torch_private._named("torch:_C._no_such_name")
    with pytest.raises(UnsupportedError, match=r"torch\._C\._no_such_name"):
        absent()
    assert torch_private.missing() == ["torch._C._no_such_name"]


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    uses = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not uses, "\n".join(uses)
