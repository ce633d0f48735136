"""docs/hazards.md and docs/promises.md name the tests of each id, and tests carry these ids in their names: both ways agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HAZARDS, PROMISES = ROOT / "docs" / "hazards.md", ROOT / "docs" / "promises.md"
PAGES = {HAZARDS: ("ABCDEFGHIJKLMNO", 5), PROMISES: ("P", 3)}
"""Letters of the ids, in order, and columns."""
TESTS = {
    path.relative_to(ROOT / "tests").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests").rglob("*.py"))
}
DEFINED = [(path, name) for path, text in TESTS.items() for name in re.findall(r"^ *def (test_\w+)\(", text, re.M)]

OTHER_LISTS = {"cpu/parking/test_away_changes.py": "A"}
"""Letters that are, in the names of these files' tests, of another list: the rules of runtime/parked.py."""
CELL = re.compile(r"`test_\w+`(, `test_\w+`)*|no test: (\S+ ){2,}\S+")
"""What may be in the column "test": names, or a reason of three words or more."""
CITED = re.compile(r"(?<![\w-])[A-P]\d{1,2}(?!\w)")
"""An id where it stands alone: not a compiler's -O2."""


class Row(NamedTuple):
    id: str
    cells: list[str]

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(test_\w+)`", self.cells[-1])


def rows(page: Path) -> list[Row]:
    """All lines of the page's tables but their heads."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(cells[0], cells) for cells in table if cells[0] != "id" and set(cells[0]) != {"-"}]


ROWS = {page: rows(page) for page in PAGES}
BY_ID = {row.id: row for page in PAGES for row in ROWS[page]}


def ids_of(name: str) -> list[str]:
    """The ids that the name of a test begins with."""
    beginning = re.match(r"test_((?:[a-p]\d{1,2}_)+)", name)
    return beginning[1].upper().strip("_").split("_") if beginning else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_ids_occur_once_dense_and_in_order(page: Path) -> None:
    letters, columns = PAGES[page]
    ids = [row.id for row in ROWS[page]]
    counts = {letter: sum(id.startswith(letter) for id in ids) for letter in letters}
    assert all(counts.values())
    assert ids == [f"{letter}{number}" for letter in letters for number in range(1, counts[letter] + 1)]
    assert all(len(row.cells) == columns and all(row.cells) for row in ROWS[page])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_row_names_tests_or_says_why_there_is_none(page: Path) -> None:
    assert [row.id for row in ROWS[page] if not CELL.fullmatch(row.cells[-1])] == []
    assert [row.id for row in ROWS[page] if len(row.tests) != len(set(row.tests))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_are_named_are_there(page: Path) -> None:
    names = {name for _, name in DEFINED}
    assert [(row.id, name) for row in ROWS[page] for name in row.tests if name not in names] == []


def test_each_test_that_carries_an_id_is_named_in_its_row() -> None:
    missing = [
        (id, name, path)
        for path, name in DEFINED
        for id in ids_of(name)
        if id[0] not in OTHER_LISTS.get(path, "") and (id not in BY_ID or name not in BY_ID[id].tests)
    ]
    assert missing == []


def test_ids_that_are_cited_are_in_the_catalogue() -> None:
    """In tests and in the package: whatever looks like an id is one, be it of another list whose numbers are as low."""
    texts = dict(TESTS)
    for path in sorted((ROOT / "lightning_memopt").rglob("*.py")):
        texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    assert [(path, id) for path, text in texts.items() for id in CITED.findall(text) if id not in BY_ID] == []


@pytest.mark.parametrize("path", OTHER_LISTS)
def test_other_lists_are_still_in_use(path: str) -> None:
    letters = {id[0] for where, name in DEFINED for id in ids_of(name) if where == path}
    assert set(OTHER_LISTS[path]) <= letters


def test_the_checks_themselves_find() -> None:
    assert ids_of("test_b3_p3_buffer_moved_in_forward") == ["B3", "P3"]
    assert ids_of("test_f_updates_in_backward") == ids_of("test_16_bits") == ids_of("test_q1_tied") == []
    assert CELL.fullmatch("`test_a`, `test_b`") and CELL.fullmatch("no test: not built yet")
    assert not any(map(CELL.fullmatch, ("", "test_a", "`test_a` and `test_b`", "no test: later", "no test:")))
    cited = CITED.findall("(D5), E6 to E8: `-O2`, E4M3, A100, test_a1_x")
    assert cited == ["D5", "E6", "E8"]
