"""Tables as text, drawn by `rich`.

`rich` is imported only when the first table is drawn, because importing it draws numbers from Python's `random`.
"""

from __future__ import annotations

import functools
import io
import random
from dataclasses import dataclass, field
from typing import Any, Literal

Justify = Literal["left", "right"]


@functools.cache
def _rich() -> tuple[Any, Any]:
    """(Console, Table) of `rich`. The state of Python's `random` is restored, so the user's program draws the same numbers."""
    state = random.getstate()
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    finally:
        random.setstate(state)
    return Console, RichTable


@dataclass
class Table:
    """A table of text with a title. `show_header`: whether the names of the columns are shown."""

    title: str
    show_header: bool = True
    _columns: list[tuple[str, Justify]] = field(default_factory=list)
    _rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_column(self, header: str = "", justify: Justify = "left") -> None:
        self._columns.append((header, justify))

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)


def render(table: Table, width: int = 110) -> str:
    """The table as lines of at most `width` characters."""
    console, rich_table = _rich()
    grid = rich_table(title=table.title, show_header=table.show_header)
    for header, justify in table._columns:
        grid.add_column(header, justify=justify)
    for row in table._rows:
        grid.add_row(*row)
    out = io.StringIO()
    # the user's names of modules are plain text: `head[cls]` is not markup, and `a:b:c` is not an emoji
    console(file=out, width=width, force_terminal=False, markup=False, emoji=False, highlight=False).print(grid)
    return out.getvalue().rstrip()
