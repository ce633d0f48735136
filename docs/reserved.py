"""Writes the table of docs/measurements/reserved.md from benchmarks/results/reserved.json: python docs/reserved.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "measurements" / "reserved.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "reserved.json"
BEGIN, END = "<!-- table: python docs/reserved.py -->", "<!-- end of the table -->"
CELLS = 30
"""Of a model: five budgets, three updates, two allocators."""
HEAD = """\
| model | rows of 30 | reserved: exact | largest error | allocated: largest error | above the budget |
|---|---|---|---|---|---|
"""

Row = dict[str, Any]


def errors(row: Row) -> tuple[float, float]:
    """Of reserved and of allocated bytes, in percent: 1 is 1 % more predicted than measured."""
    reserved, allocated = (100 * (row[f"predicted_{of}"] / row[f"measured_{of}"] - 1) for of in ("reserved", "allocated"))
    return reserved, allocated


def is_above(row: Row) -> bool:
    return bool(row["measured_reserved"] > row["budget"])


def counted(rows: list[Row]) -> tuple[int, int, float, float, int]:
    """Rows, exact ones, the largest errors of reserved and of allocated bytes, rows above their budgets."""
    exact = sum(row["predicted_reserved"] == row["measured_reserved"] for row in rows)
    worst = [max((errors(row)[i] for row in rows), key=abs, default=0.0) for i in range(2)]
    return len(rows), exact, worst[0], worst[1], sum(map(is_above, rows))


def table(results: dict[str, Any]) -> str:
    """One line a model, and every row outside of what is asked."""
    rows: dict[str, Row] = results["rows"]
    lines = []
    for model in results["models"]:
        of_model = [row for row in rows.values() if row["model"] == model]
        count, exact, reserved, allocated, above = counted(of_model)
        said = f"{exact} | {reserved:+.2f} % | {allocated:+.3f} % | {above}" if count else "not run | | |"
        lines.append(f"| {model} | {count} | {said} |")
    count, exact, reserved, allocated, above = counted(list(rows.values()))
    lines.append(
        f"| all | {count} of {CELLS * len(results['models'])} | {exact} | {reserved:+.2f} % | {allocated:+.3f} % | {above} |"
    )
    outside = []
    for name, row in rows.items():
        reserved, allocated = errors(row)
        if abs(reserved) > 3 or abs(allocated) > 0.1 or is_above(row):
            above_text = ", above its budget" * is_above(row)
            outside.append(f"- {name}: reserved {reserved:+.2f} %, allocated {allocated:+.3f} %{above_text}; {row['solver']}")
    found = (
        "Rows outside of 3 % or 0.1 %, or above their budget:\n\n" + "\n".join(outside)
        if outside
        else ("No row is outside of 3 % or 0.1 %, and none is above its budget.")
    )
    return f"{HEAD}{chr(10).join(lines)}\n\n{found}"


def page() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(json.loads(RESULTS.read_text(encoding='utf-8')))}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
