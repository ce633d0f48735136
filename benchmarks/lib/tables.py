"""Tables as text."""

from __future__ import annotations


def print_table(rows: list[dict[str, object]]) -> None:
    """One line of names, one line per row: all rows have the same keys."""
    widths = [max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]]
    for values in (rows[0].keys(), *(row.values() for row in rows)):
        print("  ".join(str(value).rjust(width) for value, width in zip(values, widths, strict=True)))


def print_titled(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A blank line, the title, the head and the rows; the first column is flush left."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for r in [head, *rows]:
        print(
            "  "
            + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True)))
        )
