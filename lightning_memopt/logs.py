"""Messages of runs to their user, through the logger `lightning_memopt`. Only this module uses that logger.

Lines go to the handlers that the program has set up, for this logger or for the root logger. If it has set up none, lines of
level INFO or above are written to stderr (`logging` itself would show only warnings). Levels are those of `logging`:
`logging.getLogger("lightning_memopt").setLevel(logging.WARNING)` silences runs, and `logging.DEBUG` adds the progress of
solvers.

A line never ends up on the same line as a progress bar. Bars of tqdm are cleared before it and drawn again below it, whichever
handler writes. While `rich` draws, it replaces `sys.stderr` by a stream that prints above its drawing, so `sys.stderr` is
looked up for every line.

Commands print their results to stdout without this module, and warnings do not go through it either.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable

LOGGER = logging.getLogger("lightning_memopt")
Say = Callable[[str], None]
"""Tells the user a line."""


def say(text: str) -> None:
    """Tell the user one or more lines about a run: its progress and its decisions."""
    _log(logging.INFO, text)


def detail(text: str) -> None:
    """A line about the progress of a solver, shown with `logging.DEBUG`."""
    _log(logging.DEBUG, text)


def silent(_: str) -> None:
    """Used instead of `say` on ranks and in runs that say nothing."""


class Once:
    """Says each line once. `keys`: those of the lines that were said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.keys: set[str] = set()
        self._say = say

    def __call__(self, line: str, key: str = "") -> None:
        """`key`: stands for all lines that tell the same, with other numbers; without one, the line does."""
        if (key or line) not in self.keys:
            self.keys.add(key or line)
            self._say(line)


def _log(level: int, text: str) -> None:
    if LOGGER.hasHandlers():
        if LOGGER.isEnabledFor(level):
            with _above_bars():
                LOGGER.log(level, text)
    elif _enabled_for_stderr(level) and _passes(level, text):
        with _above_bars():
            _write(text)


def _write(text: str) -> None:
    """Write to the current `sys.stderr`. If that fails (it is closed, or a broken pipe), training goes on."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _passes(level: int, text: str) -> bool:
    """Whether the filters of the logger let a line pass. Without filters no record is made, which would read a clock."""
    return not LOGGER.filters or bool(LOGGER.filter(LOGGER.makeRecord(LOGGER.name, level, __file__, 0, text, (), None)))


def _enabled_for_stderr(level: int) -> bool:
    """Whether a line of this level is shown if the program has set up no handler."""
    if LOGGER.level == logging.NOTSET and LOGGER.getEffectiveLevel() == logging.WARNING:  # no level was set, either
        return level >= logging.INFO and level > LOGGER.manager.disable and not LOGGER.disabled
    return LOGGER.isEnabledFor(level)


def _above_bars() -> contextlib.AbstractContextManager[None]:
    """Within, the bars that tqdm draws on the terminal are cleared."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", ()):
        return contextlib.nullcontext()
    above: contextlib.AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stderr)
    return above
