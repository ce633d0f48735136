"""What runs tell their user: the logger `lightning_memopt`, and the one door to it.

Lines go to the handlers that the program has set up, for this logger or for the root logger. Where it has set up none, they go
to stderr as they are, from INFO on: `logging` itself would show warnings only. Levels are those of `logging`:
`logging.getLogger("lightning_memopt").setLevel(logging.WARNING)` silences runs, and `logging.DEBUG` adds how solvers get on.

A line is never glued to a progress bar. Bars of tqdm are cleared before it and drawn again below it, whichever handler writes.
While `rich` draws, `sys.stderr` is its own, which prints above what it draws; so the name is looked up for every line.

What commands are asked for is printed to stdout and is no matter of this module, nor are warnings.
"""

from __future__ import annotations

import contextlib
import logging
import sys

LOGGER = logging.getLogger("lightning_memopt")


def say(text: str) -> None:
    """Tell the user a line, or several: where a run is, and what was decided."""
    _log(logging.INFO, text)


def detail(text: str) -> None:
    """A line for who asks for `logging.DEBUG`: how a solver gets on."""
    _log(logging.DEBUG, text)


def silent(_: str) -> None:
    """What `say` is on ranks and in runs that say nothing."""


def _log(level: int, text: str) -> None:
    if LOGGER.hasHandlers():
        if LOGGER.isEnabledFor(level):
            with _above_bars():
                LOGGER.log(level, text)
    elif _enabled_for_stderr(level) and _passes(level, text):
        with _above_bars():
            _write(text)


def _write(text: str) -> None:
    """Write to what `sys.stderr` is now. Where that fails (it is closed, or a pipe that nobody reads), training goes on."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _passes(level: int, text: str) -> bool:
    """Whether the filters of the logger let a line pass. Without any no record is made: it would read the script's clock."""
    return not LOGGER.filters or bool(LOGGER.filter(LOGGER.makeRecord(LOGGER.name, level, __file__, 0, text, (), None)))


def _enabled_for_stderr(level: int) -> bool:
    """Whether a line of this level is shown where the program has set up no handler."""
    if LOGGER.level == logging.NOTSET and LOGGER.getEffectiveLevel() == logging.WARNING:  # nobody has set a level, either
        return level >= logging.INFO and level > LOGGER.manager.disable and not LOGGER.disabled
    return LOGGER.isEnabledFor(level)


def _above_bars() -> contextlib.AbstractContextManager[None]:
    """Within, the bars that tqdm draws on the terminal are away."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", ()):
        return contextlib.nullcontext()
    above: contextlib.AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stderr)
    return above
