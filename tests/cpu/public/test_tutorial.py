"""The README and the tutorial say what their code prints: every block runs, in order, and its lines are those on the page.

A page has blocks of Python, each followed by a block of text if it prints something, and blocks of one command (`$ memopt ...`)
with the lines that it prints. A page may leave lines out (a Trainer's own); the lines that it shows must come in their order.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cpu.lib.scripts import Interpreter

pytest.importorskip("lightning")

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
MARK = "--- block"
SAME_ROWS = ("budget", "unmodified peak")
"""Rows of the table whose figures no time decides; of the others only the label is compared."""


@dataclass
class Block:
    """What one block of a page runs, and what the page says that it prints."""

    code: str
    printed: str
    varies: bool
    """The page says that the figures depend on times: only the number of lines is compared."""


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run, in their order."""
    found: list[Block] = []
    before = ""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S):
        language, text = match.groups()
        between = page[len(before) : match.start()]
        if language == "python":
            found.append(Block(text, "", False))
        elif language == "console":
            command, _, printed = text.partition("\n")
            arguments = command.removeprefix("$ memopt ").split()
            code = f"from lightning_memopt import cli\ncli.main({arguments})\n"
            found.append(Block(code, printed, "<!-- varies -->" in between))
        elif language == "text":
            found[-1].printed, found[-1].varies = text, "<!-- varies -->" in between
        before = page[: match.end()]
    return found


def run(page: list[Block], folder: Path) -> list[str]:
    """What each block prints, stdout and stderr, in one process."""
    script = folder / "page.py"
    script.write_text("".join(f'print("{MARK}")\n{block.code}' for block in page))
    command = [sys.executable, "-u", str(script)]
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout
    return [text.removeprefix("\n") for text in ended.stdout.split(MARK)[1:]]


def stable(line: str) -> str:
    """The part of a line that every machine prints: no times, and nothing of the plan that times led to. Empty: nothing."""
    if line.startswith("│"):
        label, content = [*line.split("│"), ""][1:3]
        return " ".join(f"{label} {content}".split()) if label.strip() in SAME_ROWS else label.strip()
    if re.match(r"MemOpt: +(chain|solving)|[┌┏└┗├┡]", line):
        return ""
    line = re.sub(r"^(MemOpt: plan in force).*", r"\1", line)
    return " ".join(line.split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_prints_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    interpreter.stands_in(monkeypatch, "lightning.pytorch")
    page = blocks(path.read_text())
    assert page and any(block.printed for block in page)
    for block, actual in zip(page, run(page, tmp_path), strict=True):
        if block.varies:
            assert len(actual.splitlines()) >= len(block.printed.splitlines()) > 0, block.code
            continue
        left = iter([stable(line) for line in actual.splitlines()])
        for line in filter(None, map(stable, block.printed.splitlines())):
            assert line in left, f"{line!r} of {path.name} is not printed here, or not in this order:\n{actual}"
