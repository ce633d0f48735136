"""Where the lines of runs go: to stderr, or to the program's handlers, once; above progress bars; nowhere by the level."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAY = """
from lightning_memopt import logs
logs.say("MemOpt: a line of 100 %s")
logs.detail("MemOpt:   a solver")
"""
LINE, DETAIL = "MemOpt: a line of 100 %s\n", "MemOpt:   a solver\n"
LOGGER = "import logging; logger = logging.getLogger('lightning_memopt')\n"
BASIC = LOGGER + "logging.basicConfig(format='%(levelname)s %(name)s %(message)s', level={level})\n"


def said(code: str) -> str:
    """What a process writes to stderr. It writes nothing to stdout."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and done.stdout == b"", done.stderr.decode()
    return done.stderr.decode()  # with the carriage returns of bars


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", LINE),
        (LOGGER + "logger.setLevel(logging.WARNING)", ""),
        (LOGGER + "logger.setLevel(logging.DEBUG)", LINE + DETAIL),
        (LOGGER + "logging.getLogger().setLevel(logging.ERROR)", ""),
        (LOGGER + "logging.disable(logging.INFO)", ""),
        (LOGGER + "logger.disabled = True", ""),
        (LOGGER + "logger.addFilter(lambda record: 'line' not in record.getMessage())", ""),
        (LOGGER + "logger.addHandler(logging.NullHandler()); logger.setLevel(logging.INFO)", ""),
        (BASIC.format(level="logging.INFO"), "INFO lightning_memopt " + LINE),
        (BASIC.format(level="logging.WARNING"), ""),
        (BASIC.format(level="logging.DEBUG"), "INFO lightning_memopt " + LINE + "DEBUG lightning_memopt " + DETAIL),
        (BASIC.format(level="logging.INFO") + "logger.setLevel(logging.WARNING)", ""),
        (BASIC.format(level="logging.INFO") + "logger.addHandler(logging.NullHandler())", "INFO lightning_memopt " + LINE),
        ("import sys; sys.stderr = None", ""),
        ("import sys; sys.stderr.close()", ""),
    ],
)
def test_the_program_decides_what_is_shown(before: str, expected: str) -> None:
    assert said(f"{before}\n{SAY}") == expected


def test_handlers_that_come_later_are_the_only_ones() -> None:
    """Scripts import first and set up logging afterwards."""
    later = BASIC.format(level="logging.INFO")
    assert said(f"{SAY}{later}{SAY}") == f"{LINE}INFO lightning_memopt {LINE}"


def test_the_clock_of_a_script_is_not_read() -> None:
    """A script may replace it by as many readings as it needs."""
    code = "import logging, time\nreadings = iter(())\ntime.time = time.time_ns = lambda: next(readings)\n"
    assert said(code + SAY) == LINE


TQDM = """
import io, logging, sys
from tqdm import tqdm
from lightning_memopt import logs
bar = tqdm(total=4, file={file}, ncols=40)
bar.update()
bar.refresh()
logs.say("MemOpt: a line")
bar.close()
"""


@pytest.mark.parametrize("logging", ["", "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')"])
def test_no_line_is_glued_to_a_bar_of_tqdm(logging: str) -> None:
    """It is cleared before the line, and drawn again below it; also where the handler is the program's."""
    pytest.importorskip("tqdm")
    before, _, after = said(f"{logging}\n{TQDM.format(file='sys.stderr')}").partition("MemOpt: a line\n")
    drawn, cleared = before.split("\r")[-3:-1]
    assert "1/4" in drawn and cleared.strip() == "" and len(cleared) >= len(drawn.strip()), "cleared where the line begins"
    assert before.endswith("\r") and after.startswith("\r") and "1/4" in after, "drawn again"


def test_a_bar_in_a_file_is_left_alone() -> None:
    pytest.importorskip("tqdm")
    code = TQDM.format(file="file") + "assert file.getvalue().count('25%') <= 2, file.getvalue()\n"
    assert said(code.replace("bar =", "file = io.StringIO()\nbar =", 1)) == "MemOpt: a line\n"


def test_rich_shows_a_line_above_what_it_draws() -> None:
    """While it draws on a terminal it has replaced stderr, maybe after a line was said."""
    pytest.importorskip("rich")
    code = """
import io, sys
from rich.console import Console
from rich.progress import Progress
from lightning_memopt import logs
logs.say("MemOpt: before")
shown = io.StringIO()
with Progress(console=Console(file=shown, force_terminal=True, width=60), auto_refresh=False) as progress:
    progress.add_task("work", total=4)
    progress.refresh()
    logs.say("MemOpt: a [red] line")
lines = [line for line in shown.getvalue().splitlines() if "MemOpt" in line]
assert len(lines) == 1 and "work" not in lines[0] and lines[0].endswith("MemOpt: a [red] line"), shown.getvalue()
logs.say("MemOpt: after")
"""
    assert said(code) == "MemOpt: before\nMemOpt: after\n"
