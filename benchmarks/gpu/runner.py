"""Runs parts one after the other, each in a process of its own, until the time is up. Needs no torch.

A part that crashes or hangs costs itself alone: its process group is killed at its limit, and what it had written stays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import lines
from benchmarks.gpu.parts import Part
from benchmarks.lib.paths import ROOT

GRACE_SECONDS = 5.0
"""Kept free at the end, for a process that does not die at once."""
OUTPUT_CHARACTERS = 4000
"""Of the end of a part's output."""


def run(parts: Sequence[Part], path: Path, deadline: float, again: bool, say: Callable[[str], None]) -> None:
    """Run those that have no result in the file; `again`: all. `deadline`: of `time.monotonic()`.

    First those that never began, in their order; then those in which the machine went before they ended.
    """
    known = {} if again else lines.outcomes(path)
    waiting = [part for part in parts if part.repeated or part.name not in known or known[part.name].status not in lines.FINAL]
    waiting.sort(key=lambda part: part.name in known and known[part.name].ended is None)
    for part in waiting:
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        left = deadline - GRACE_SECONDS - time.monotonic()
        if missing:
            end(part, path, say, status="left out", reason=f"{' and '.join(missing)} not installed")
        elif left < part.seconds:
            say(f"{part.name}: takes about {part.seconds:.0f} s, and {max(0.0, left):.0f} are left")
        else:
            _run(part, path, left, say)


def end(part: Part, path: Path, say: Callable[[str], None], status: str, reason: str = "", **more: Any) -> None:
    """Write how a part ended, and say so."""
    lines.append(path, kind="part", part=part.name, status=status, reason=reason, proves=part.proves, **more)
    took = f" ({more['seconds']:.0f} s)" if "seconds" in more else ""
    say(f"{part.name}: {status}{took}{': ' * bool(reason)}{reason}")


def _run(part: Part, path: Path, left: float, say: Callable[[str], None]) -> None:
    limit = min(part.limit_seconds, left)
    say(f"{part.name}: about {part.seconds:.0f} s, at most {limit:.0f}")
    lines.append(path, kind="began", part=part.name, command=[*part.words], environment=dict(part.environment))
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        returned = _returned(part, path, limit, output)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - OUTPUT_CHARACTERS))
        text = output.read().decode(errors="replace")
    outcome = lines.outcomes(path)[part.name]
    status, reason = verdict(returned, left < part.limit_seconds, outcome)
    end(
        *(part, path, say, status, reason),
        seconds=round(time.monotonic() - began, 2),
        expected_seconds=part.seconds,
        limit_seconds=round(limit, 2),
        returned=returned,
        passed=len(outcome.named("passed")),
        failed=outcome.named("failed"),
        skipped=outcome.named("skipped"),
        underway=outcome.underway,
        output=text,
    )


def _returned(part: Part, path: Path, limit: float, output: Any) -> int | None:
    """What the process returned; None where it was stopped at its limit."""
    environment = {**os.environ, "MEMOPT_CACHE": "0", "PYTHONUNBUFFERED": "1", **part.environment}
    command = [sys.executable, *part.words, "--lines", str(path), "--part", part.name]
    # a group, and no session: what stops this process from outside, with its session, stops that one too
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, preexec_fn=os.setpgrp)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also what it started, and also where this process is interrupted
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for the driver may outlive the signal
            process.wait(GRACE_SECONDS / 2)


def verdict(returned: int | None, cut: bool, outcome: lines.Outcome) -> tuple[str, str]:
    """(status, reason). `cut`: the limit was what was left of the whole time, not the part's own."""
    at = f" in {outcome.underway}" if outcome.underway else ""
    failed, skipped = outcome.named("failed"), outcome.named("skipped")
    if returned is None:
        return ("cut short", f"the time was up{at}") if cut else ("timed out", f"stopped{at}".strip())
    if returned < 0:
        return "crashed", f"{signal.Signals(-returned).name}{at}"
    if failed:
        return "failed", f"{len(failed)} of {len(outcome.tests)}: {', '.join(failed[:3])}{', ...' * (len(failed) > 3)}"
    if returned not in (0, 5):  # pytest returns 5 where there was no test to run
        return "crashed", f"returned {returned}{at}"
    if not outcome.named("passed") and (skipped or returned):
        reasons = {outcome.tests[name].get("message", "") for name in skipped}
        return "left out", "; ".join(sorted(filter(None, reasons))) or "no test"
    return "passed", f"{len(outcome.named('passed'))} passed" + f", {len(skipped)} skipped" * bool(skipped)
