"""Results as lines of JSON in one file, each written as it is made: they outlive the machine.

Needs no torch. The command and the processes of its parts append to the same file, one at a time.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINAL = ("passed", "failed", "crashed", "timed out")
"""What becomes of a part that is not run again unless it is asked for."""


def append(path: Path, **line: Any) -> None:
    """Write one line, on the disk when this returns. A torn line before it stays alone."""
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if size := file.tell():
            file.seek(size - 1)
        torn = bool(size) and file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in their order."""
    found = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # torn: the machine went while it was written
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


@dataclass
class Outcome:
    """What is known of a part, from its last beginning on.

    ended: the line with which it ended; None where the machine went before.
    tests: name of a test, or of a row of a benchmark -> its last line.
    """

    ended: dict[str, Any] | None = None
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return "never ended" if self.ended is None else str(self.ended["status"])

    def named(self, outcome: str) -> list[str]:
        return [name for name, line in self.tests.items() if line["outcome"] == outcome]

    @property
    def underway(self) -> str | None:
        """The test that had begun and not ended."""
        return next(iter(self.named("began")), None)


def outcomes(path: Path) -> dict[str, Outcome]:
    """By the name of a part. One that did not fit is as if it had not been asked for."""
    found: dict[str, Outcome] = {}
    for line in read(path):
        kind, part = line.get("kind"), str(line.get("part"))
        if kind == "began":
            found[part] = Outcome()
        elif kind == "test":
            found.setdefault(part, Outcome()).tests[line["test"]] = line
        elif kind == "part":
            found.setdefault(part, Outcome()).ended = line
    return found
