"""`memopt place`: files in and out, exit codes, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lightning_memopt.cli import main
from lightning_memopt.solvers.placement import Buffer, faults

ROWS = "id,lower,upper,size\na,0,3,10\nb,1,4,10\nc,3,6,10\n"


def write(folder: Path, text: str) -> str:
    path = folder / "buffers.csv"
    path.write_text(text)
    return str(path)


def test_offsets_are_written_beside_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "placed.csv"
    assert main(["place", write(tmp_path, ROWS), "--capacity", "20", "--seconds", "5", "-o", str(out)]) == 0
    assert "3 buffers in 20 bytes, 0.0000 %" in capsys.readouterr().out
    header, *rows = csv.reader(out.read_text().splitlines())
    assert header == ["id", "lower", "upper", "size", "offset"] and [row[0] for row in rows] == ["a", "b", "c"]
    buffers = [Buffer(row[0], *map(int, row[1:4])) for row in rows]
    assert not faults(buffers, [int(row[4]) for row in rows], 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["buffers.csv", "placed.csv"]


def test_without_a_capacity_as_low_as_possible(tmp_path: Path) -> None:
    assert main(["place", write(tmp_path, ROWS), "-o", str(tmp_path / "placed.csv")]) == 0


def test_no_fit_exits_with_3_and_the_best_height(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was there before stays."""
    out = tmp_path / "placed.csv"
    out.write_text("before")
    path = write(tmp_path, ROWS)
    assert main(["place", path, "--capacity", "19", "--seconds", "1", "-o", str(out)]) == 3
    message = capsys.readouterr().err
    assert "within 19 bytes" in message and "20 bytes are live at one moment" in message and "--capacity 20" in message
    assert out.read_text() == "before"
    assert main(["place", path, "--capacity", "20", "-o", str(out)]) == 0 and out.read_text() != "before"


def test_columns_in_any_order_spaces_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_bytes('\ufeffsize, id ,upper,lower\r\n10,a,3,-2\r\n\r\n 10 ,"b,c",4,1\r\n'.encode())
    assert main(["place", str(path), "-o", str(tmp_path / "placed.csv")]) == 0
    rows = list(csv.reader((tmp_path / "placed.csv").read_text().splitlines()))
    assert [row[:4] for row in rows[1:]] == [["a", "-2", "3", "10"], ["b,c", "1", "4", "10"]]


@pytest.mark.parametrize(
    "text, line, what",
    [
        ("", "", "is empty"),
        ("id,lower,upper\n", "line 1", "the columns are id,lower,upper; write id,lower,upper,size"),
        ("id,lower,upper,size,alignment\n", "line 1", "no others"),
        ("a,0,3,10\n", "line 1", "the columns are"),
        ("id,lower,upper,size\na,0,3\n", "line 2", "3 values for 4 columns"),
        ("id,lower,upper,size\n\na,0,3,4KiB\n", "line 3", "size is '4KiB'"),
        ("id,lower,upper,size\na,0,3.5,4\n", "line 2", "upper is '3.5'"),
        ("id,lower,upper,size\na,3,3,4\n", "line 2", "upper 3 is not above lower 3"),
        ("id,lower,upper,size\na,0,3,0\n", "line 2", "size 0 is not positive"),
        ("id,lower,upper,size\na,0,3,-4\n", "line 2", "size -4 is not positive"),
        ("id,lower,upper,size\na,0,3,4\na,0,3,4\n", "line 3", "that of line 2"),
        ("id,lower,upper,size\n,0,3,4\n", "line 2", "the id is empty"),
        (f"id,lower,upper,size\na,0,3,{1 << 62}\n", "line 2", "below 2^62"),
        (f"id,lower,upper,size\na,0,3,{'9' * 5000}\n", "line 2", "below 2^62"),
        ('id,lower,upper,size\n"a,0,3,4\n', "line 2", "check the quotes"),
    ],
)
def test_bad_files_exit_with_2_and_name_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str, what: str
) -> None:
    out = tmp_path / "placed.csv"
    assert main(["place", write(tmp_path, text), "--capacity", "100", "-o", str(out)]) == 2
    message = capsys.readouterr().err
    assert line in message and what in message and message.count("\n") == 1 and not out.exists()


def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, ROWS)
    assert main(["place", str(tmp_path / "none.csv")]) == 2
    assert main(["place", path, "-o", str(tmp_path / "none" / "placed.csv")]) == 2
    assert main(["place", path, "-o", "/dev/null"]) == 2 and Path("/dev/null").exists()
    assert main(["place", path, "--capacity", "8Gbit", "-o", str(tmp_path / "x.csv")]) == 2
    assert main(["place", path, "--capacity", "50%", "-o", str(tmp_path / "x.csv")]) == 2
    assert main(["place", path, "--seconds", "-1", "-o", str(tmp_path / "x.csv")]) == 2
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert main(["place", str(tmp_path / "binary.csv"), "-o", str(tmp_path / "x.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 7 and not (tmp_path / "x.csv").exists()
