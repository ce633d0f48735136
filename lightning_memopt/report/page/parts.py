"""The parts of a page: sections with pictures and tables. They are plain text, which `html.py` escapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_memopt.units import format_nbytes


class Cell(NamedTuple):
    """A cell of a table: its text, and the exact number that the text rounds; None if the text is not a number."""

    text: str
    value: float | None = None


def size(nbytes: int | None, missing: str = "not measured") -> Cell:
    """Bytes; `missing` if they are None."""
    return Cell(missing) if nbytes is None else Cell(format_nbytes(nbytes), nbytes)


def ms(seconds: float | None, missing: str = "not measured") -> Cell:
    """Seconds, shown as milliseconds."""
    if seconds is None:
        return Cell(missing)
    return Cell(f"{1e3 * seconds:,.3f} ms" if seconds < 0.01 else f"{1e3 * seconds:,.1f} ms", seconds)


def count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def share(part: float, whole: float) -> Cell:
    return Cell(f"{100 * part / whole:.1f} %" if whole else "", part / whole if whole else None)


Rows = list[list[Cell | str]]


@dataclass(frozen=True)
class Grid:
    """A table.

    key: its id on the page.
    opened: whether it is shown at once, not folded behind its caption.
    printed: whether it is unfolded when the page is printed.
    """

    key: str
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell | str]]
    opened: bool = False
    printed: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawing by page.js. `kind`: which drawing. `label`: what it shows, for readers who cannot see it. `data`: JSON."""

    kind: str
    title: str
    label: str
    data: dict[str, Any]


class Card(NamedTuple):
    """A figure that is shown large. `how`: whether it was predicted, measured or proven."""

    name: str
    cell: Cell
    how: str


@dataclass(frozen=True)
class Branch:
    """A node of a tree that can be folded: a line, tables below it, and nodes below it.

    shares: name -> length in a bar before the line; 1 is the whole width. `opened`: whether it is unfolded at first.
    """

    title: str
    line: str
    shares: tuple[tuple[str, float], ...] = ()
    opened: bool = False
    grids: tuple[Grid, ...] = ()
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    lead: paragraphs.
    alarms: paragraphs that are highlighted.
    legend: (class of the colour, what it means), shown before the tree.
    tree: shown between pictures and tables.
    absent: whether there is nothing to show; the lead says why.
    """

    key: str
    title: str
    lead: tuple[str, ...]
    alarms: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    pictures: tuple[Picture, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    tree: tuple[Branch, ...] = ()
    grids: tuple[Grid, ...] = ()
    absent: bool = False
