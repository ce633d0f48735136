"""The file of a comparison. It is written after each row, so that a later run continues one that ended early.

    {"format": "lightning_memopt.bench", "schema": 1, "asked": {...}, "machine": {...}, "models": {MODEL: {LABEL: ROW}}}

`asked` and `machine` decide the rows and their numbers. A file with other values of them is never continued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.errors import ConfigError

_FORMAT, _SCHEMA = "lightning_memopt.bench", 1
Rows = dict[str, dict[str, Any]]


class Results:
    """What was measured so far. Opens the file of an earlier run with the same arguments, if there is one.

    Args:
        path: the file; its folder is made.
        asked: the arguments, as JSON.
        machine: the machine, as JSON.
        again: whether to measure everything once more.

    Raises ConfigError if the file has other arguments or another machine, or is not such a file.
    """

    def __init__(self, path: Path, asked: dict[str, Any], machine: dict[str, Any], again: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": _FORMAT, "schema": _SCHEMA, "asked": asked, "machine": machine, "models": {}}
        if path.exists() and not again:
            self.data = read(path)
            for what, now in (("asked", asked), ("machine", machine)):
                then = self.data[what]
                other = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
                if other:
                    said = ", ".join(f"{name} was {then.get(name)}, is {now.get(name)}" for name in other)
                    kind = "other arguments" if what == "asked" else "another machine"
                    raise ConfigError(f"{path} is of {kind}: {said}. Give another --out, or --again to measure all of it.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {path.parent}: {error.strerror}. Give a folder that can be written to.") from None

    def rows(self, model: str) -> Rows:
        """The rows of a model by label, in the order in which they were measured."""
        rows: Rows = self.data["models"].setdefault(model, {})
        return rows

    def write(self) -> None:
        jsonio.write(self.path, self.data)

    @contextlib.contextmanager
    def running(self, model: str, label: str, method: str, budget: str) -> Iterator[None]:
        """Within, a row is measured. If the process dies in it, the file says so, and the row is not measured again."""
        died = {"method": method, "budget": budget, "state": "died", "reason": "the process died in this row"}
        self.rows(model)[label] = died
        self.write()
        try:
            yield
        except BaseException:  # an interrupt is not the row's fault, so the next run measures it
            self.rows(model).pop(label, None)
            self.write()
            raise
        self.write()


def read(path: Path) -> dict[str, Any]:
    """The content of a file of results. Raises ConfigError if it is not such a file."""
    try:
        data = jsonio.read(path)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Delete it, or give another --out.") from None
    if not isinstance(data, dict) or (data.get("format"), data.get("schema")) != (_FORMAT, _SCHEMA):
        raise ConfigError(f"{path} is not a file of `memopt bench` with schema {_SCHEMA}. Give another --out.")
    return data
