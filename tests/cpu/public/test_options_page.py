"""docs/options.md is generated, and current."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

from lightning_memopt import MemOptConfig

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_page_of_options_is_current() -> None:
    """`python docs/options.py` would write what is there."""
    generated = runpy.run_path(str(PAGE.with_suffix(".py")))["page"]()
    assert PAGE.read_text() == generated
    assert all(f"| `{field.name}` |" in generated for field in fields(MemOptConfig))
