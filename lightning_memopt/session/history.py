"""The steps of a run, one after the other: what was predicted of each, what was measured, and how long it took."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal

from lightning_memopt.clocks import perf_counter

MOST = 2048
"""Maximum number of entries. Beyond it, neighbours of one kind are joined into one entry."""

_LONGEST = 2000
"""Maximum number of characters kept of an exception's message."""

StepKind = Literal["observed", "planned", "unplanned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One step, or several steps of one kind in a row.

    kind: `observed`: recorded, without a plan. `planned`: a plan was in force. `unplanned`: neither.
    steps: how many steps.
    seconds: wall time from the end of the step before to the end of the last of these, in all: what the loop does between steps
        (data, logging) is in it. None for the first step.
    predicted_nbytes: the largest predicted peak; None without a plan.
    measured_nbytes: the largest measured peak; None where none was measured.
    """

    kind: StepKind
    steps: int = 1
    seconds: float | None = None
    predicted_nbytes: int | None = None
    measured_nbytes: int | None = None


class History:
    """Entries of the steps of a session, at most `MOST`; none unless `wanted`.

    error: type and message of what ended the run; "" where it ended well, or goes on. The exception itself is not kept: its
        traceback holds the tensors of its frames.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.error = ""
        self._entries: list[StepEntry] = []
        self._ended_at: float | None = None
        self._errors_before = _ids(_on_their_way(handled=True)) if wanted else set()

    @property
    def entries(self) -> tuple[StepEntry, ...]:
        return tuple(self._entries)

    def ended_by(self, error: BaseException) -> BaseException:
        """An error ends the run. Returns it. An exit without an error code is not an error."""
        if self.wanted and not (isinstance(error, SystemExit) and not error.code):
            self.error = f"{type(error).__name__}: {_message(error)}"
        return error

    def ends(self, handled: bool) -> None:
        """The run ends, and no front has said why: looks for an error that came after the last step.

        handled: the error that is handled at this moment counts. Not where the run ends because its model is collected: garbage
            is collected at any moment, also while an unrelated error is handled.
        """
        if self.wanted and not self.error:
            errors = [error for error in _on_their_way(handled) if id(error) not in self._errors_before]
            if errors:
                self.ended_by(errors[0])

    def step_ended(self, kind: StepKind, predicted_nbytes: int | None, measured_nbytes: int | None) -> None:
        """A step is over."""
        if not self.wanted:
            return
        now = perf_counter()
        seconds = None if self._ended_at is None else now - self._ended_at
        self._ended_at = now
        self._errors_before = _ids(_on_their_way(handled=True))
        self._entries.append(
            StepEntry(kind=kind, seconds=seconds, predicted_nbytes=predicted_nbytes, measured_nbytes=measured_nbytes)
        )
        if len(self._entries) > MOST:
            self._entries = merged(self._entries)


def merged(entries: list[StepEntry]) -> list[StepEntry]:
    """Neighbours of one kind as one entry, two by two. No peak is lost: an entry has the largest of its steps."""
    result: list[StepEntry] = []
    paired = False
    for entry in entries:
        last = result[-1] if result and not paired else None
        paired = last is not None and last.kind == entry.kind and None not in (last.seconds, entry.seconds)
        if paired and last is not None:
            result[-1] = replace(
                last,
                steps=last.steps + entry.steps,
                seconds=(last.seconds or 0.0) + (entry.seconds or 0.0),
                predicted_nbytes=_larger(last.predicted_nbytes, entry.predicted_nbytes),
                measured_nbytes=_larger(last.measured_nbytes, entry.measured_nbytes),
            )
        else:
            result.append(entry)
    return result


def _on_their_way(handled: bool) -> list[BaseException]:
    """Errors that may be what ends a run that ends now: with `handled` the one that is handled at this moment, and the last one
    that nobody caught. Where a process exits because of an error, that error comes first.
    """
    current = sys.exc_info()[1] if handled else None
    cause = current.__context__ if isinstance(current, SystemExit) else None
    uncaught = getattr(sys, "last_value", None)  # Python keeps it for debuggers
    return [error for error in (cause, current, uncaught) if isinstance(error, BaseException)]


def _ids(errors: list[BaseException]) -> set[int]:
    """Only the ids of errors are kept, because their tracebacks hold the tensors of their frames."""
    return set(map(id, errors))


def _message(error: BaseException) -> str:
    """What the error says, without halves of surrogate pairs, which no file of JSON has."""
    try:
        text = str(error)
    except Exception:  # an exception of the user's own may fail to say anything
        text = "(no message)"
    return text[:_LONGEST].encode("utf-8", errors="replace").decode()


def _larger(a: int | None, b: int | None) -> int | None:
    return max((n for n in (a, b) if n is not None), default=None)
