"""The table of docs/measurements/reserved.md is that of the results, and names what is outside of what is asked."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "reserved.py"))


def row(model: str, predicted: int, allocated: int, budget: int = 2000) -> dict[str, Any]:
    measured = {"measured_reserved": 1000, "measured_allocated": 10000, "solver": "Echo", "budget": budget}
    return {"model": model, "predicted_reserved": predicted, "predicted_allocated": allocated, **measured}


def test_the_table_is_current() -> None:
    """`python docs/reserved.py` would write what is there."""
    assert PAGE["page"]() == PAGE["PAGE"].read_text(encoding="utf-8")


def test_worst_rows_count_and_rows_outside_are_named() -> None:
    rows = {
        "a 1": row("a", 1000, 10000),
        "a 2": row("a", 960, 10005),
        "b 1": row("b", 1000, 9980, 999),
        "b 2": row("b", 1010, 10000),
    }
    lines = PAGE["table"]({"models": ["a", "b", "c"], "rows": rows}).splitlines()
    assert lines[2:6] == [
        "| a | 2 | 1 | -4.00 % | +0.050 % | 0 |",
        "| b | 2 | 1 | +1.00 % | -0.200 % | 1 |",
        "| c | 0 | not run | | | |",
        "| all | 4 of 90 | 2 | -4.00 % | -0.200 % | 1 |",
    ]
    assert [line.partition(":")[0] for line in lines[9:]] == ["- a 2", "- b 1"]
    assert "above its budget" in lines[10]
