"""Buffers as CSV files, for `memopt place`: `id,lower,upper,size`, and `offset` once they are placed."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_memopt import files
from lightning_memopt.errors import PlacementError
from lightning_memopt.solvers.placement.buffers import MOST_NBYTES, Buffer

COLUMNS = ("id", "lower", "upper", "size")
_MOST_CHARS = 100
_MOST_FILE_NBYTES = 1 << 28


def read_buffers(path: str | Path) -> list[Buffer]:
    """The buffers of a file, in its order. The columns may be in any order; blank lines are skipped.

    Raises PlacementError, with the number of the line, for a row that is not a buffer.
    """
    try:
        if os.path.getsize(path) > _MOST_FILE_NBYTES:
            raise PlacementError(f"{path} has more than {_MOST_FILE_NBYTES} bytes; give a smaller file")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = files.reason(error)
        raise PlacementError(f"{path} cannot be read as text in UTF-8: {why}; give a CSV file of {','.join(COLUMNS)}") from None
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return list(_buffers(rows, str(path)))
    except csv.Error as error:
        raise PlacementError(f"{path}, line {rows.line_num}: {error}; check the quotes of this line") from None


def _buffers(rows: Iterator[list[str]], path: str) -> Iterator[Buffer]:
    header: list[str] | None = None
    lines: dict[str, int] = {}  # id -> its line
    for row in rows:
        where = f"{path}, line {rows.line_num}"  # type: ignore[attr-defined]
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if header is None:
            header = cells
            if sorted(header) != sorted(COLUMNS):
                raise PlacementError(f"{where}: the columns are {','.join(header)[:90]}; write {','.join(COLUMNS)}, no others")
            continue
        if len(cells) != len(COLUMNS):
            raise PlacementError(f"{where}: {len(cells)} values for {len(COLUMNS)} columns; give {','.join(header)}")
        named = dict(zip(header, cells, strict=True))
        buffer = Buffer(named["id"], *(_number(named[column], column, where) for column in COLUMNS[1:]))
        if not buffer.id:
            raise PlacementError(f"{where}: the id is empty; give every buffer its own id")
        if buffer.id in lines:
            raise PlacementError(
                f"{where}: the id {buffer.id} is that of line {lines[buffer.id]}, too; give every buffer its own"
            )
        if buffer.upper <= buffer.lower:
            raise PlacementError(
                f"{where}: upper {buffer.upper} is not above lower {buffer.lower}. Lifetimes are half-open: for a buffer that "
                "is live at only one moment, give upper = lower + 1"
            )
        if buffer.size <= 0:
            raise PlacementError(f"{where}: size {buffer.size} is not positive; leave out buffers that have no bytes")
        lines[buffer.id] = rows.line_num  # type: ignore[attr-defined]
        yield buffer
    if header is None:
        raise PlacementError(f"{path} is empty; give {','.join(COLUMNS)} in its first line")


def _number(cell: str, column: str, where: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", cell):
        raise PlacementError(f"{where}: {column} is {cell[:40]!r}; give a whole number, without a unit")
    if len(cell) > _MOST_CHARS or abs(int(cell)) >= MOST_NBYTES:
        raise PlacementError(f"{where}: {column} is {cell[:40]}; give a number below 2^62")
    return int(cell)


def check_target(path: str | Path) -> None:
    """Raise PlacementError, before a long search rather than after it, if `write_placed` could not write there."""
    with _writing(path):
        files.check_target(Path(path))


def write_placed(path: str | Path, buffers: Sequence[Buffer], offsets: Sequence[int]) -> None:
    """Write buffers and offsets, whole or not at all. If it raises PlacementError, an existing file is unchanged."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "offset"])
    writer.writerows((*buffer, offset) for buffer, offset in zip(buffers, offsets, strict=True))
    with _writing(path):
        files.replace_file(Path(path), text.getvalue().encode())


@contextlib.contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlacementError(
            f"{path} cannot be written: {files.reason(error)}; give -o a CSV file in a folder that can be written to"
        ) from None
