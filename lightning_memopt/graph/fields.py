"""Objects of a JSON file, read field by field and column by column. A file may come from anywhere: everything is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from lightning_memopt.errors import PlanFileError

MOST = (1 << 63) - 1
"""The largest count, size or id that is accepted."""

_T = TypeVar("_T", bound=str)


def letters(values: tuple[_T, ...]) -> dict[str, _T]:
    """First letter -> name, for a closed set of names."""
    return {value[0]: value for value in values}


class Fields:
    """One object of a file, read field by field. Every read is checked.

    where: the path to the object, for messages.
    keys: all fields that the object must have.
    schemas: the schemas that can be read, the newest first. Empty if the object has no schema of its own.
    old_names: present name of a field -> its name in files of an older schema.
    """

    def __init__(
        self,
        obj: object,
        where: str,
        keys: Sequence[str],
        schemas: Sequence[int] = (),
        old_names: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self.old_names = old_names or {}
        if not isinstance(obj, dict):
            raise PlanFileError(f"{where} is {_shown(obj)}, not an object; make the file again")
        self.obj = obj
        if schemas:
            schema = obj.get("schema")
            if type(schema) is not int or schema not in schemas:
                known = " and ".join(map(str, schemas))
                raise PlanFileError(
                    f"{where}.schema is {_shown(schema)}; this version knows schema {known} only: "
                    "make the file again, or use the version that wrote it"
                )
        names = {self.name_of(key) for key in keys}
        missing = sorted(names - set(obj))
        unknown = sorted(str(key) for key in set(obj) - names)
        if missing or unknown:
            raise PlanFileError(f"{where}: missing fields {missing}, unknown {_shown(unknown)}; make the file again")

    def name_of(self, key: str) -> str:
        """The name of the field `key` in this file."""
        return self.old_names.get(key, key)

    def value(self, key: str) -> Any:
        return self.obj[self.name_of(key)]

    def refuse(self, key: str, index: int | None, reason: str) -> NoReturn:
        at = "" if index is None else f"[{index}]"
        raise PlanFileError(f"{self.where}.{self.name_of(key)}{at}: {reason}; make the file again")

    def inner(self, key: str, keys: Sequence[str]) -> Fields:
        return Fields(self.value(key), f"{self.where}.{self.name_of(key)}", keys, old_names=self.old_names)

    def table(self, key: str, keys: Sequence[str], counted: str) -> tuple[Fields, int]:
        """An object of columns, and their length, which is that of the column `counted`."""
        inner = self.inner(key, keys)
        column = inner.value(counted)
        if not isinstance(column, (list, str)):
            inner.refuse(counted, None, f"{_shown(column)} is not a column")
        return inner, len(column)

    def string(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            self.refuse(key, None, f"{_shown(value)} is not text")
        return value

    def strings(self, key: str) -> list[str]:
        values = self._list(key, None)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                self.refuse(key, i, f"{_shown(value)} is not text")
        return list(values)

    def objects(self, key: str) -> list[Any]:
        """A list whose entries are not checked here."""
        return list(self._list(key, None))

    def integer(self, key: str, low: int = 0, high: int = MOST) -> int:
        value = self.value(key)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, None, _no_int(value, low, high))
        return value

    def ints(self, key: str, length: int | None, low: int = 0, high: int = MOST) -> list[int]:
        """A column of `length` ints in `low .. high`."""
        values = self._list(key, length)
        for i, value in enumerate(values):
            if type(value) is not int or not low <= value <= high:  # a bool is not an int here
                self.refuse(key, i, _no_int(value, low, high))
        return values

    def lists(self, key: str, length: int | None, low: int, high: int) -> list[tuple[int, ...]]:
        """A column of `length` lists of ints in `low .. high`."""
        rows = self._list(key, length)
        for i, row in enumerate(rows):
            if not isinstance(row, list):
                self.refuse(key, i, f"{_shown(row)} is not a list")
            for value in row:
                if type(value) is not int or not low <= value <= high:
                    self.refuse(key, i, _no_int(value, low, high))
        return [tuple(row) for row in rows]

    def number(self, key: str) -> float:
        value = self.value(key)
        if not _is_amount(value):
            self.refuse(key, None, f"{_shown(value)} is not a finite number of at least 0")
        return float(value)

    def floats(self, key: str, length: int) -> list[float]:
        """A column of `length` finite numbers of at least 0."""
        values = self._list(key, length)
        for i, value in enumerate(values):
            if not _is_amount(value):
                self.refuse(key, i, f"{_shown(value)} is not a finite number of at least 0")
        return [float(value) for value in values]

    def chosen(self, key: str, length: int, values: dict[str, _T]) -> list[_T]:
        """A column of `length` values from a closed set, each written as one letter."""
        text = self.string(key)
        self._same(key, len(text), length)
        for i, letter in enumerate(text):
            if letter not in values:
                self.refuse(key, i, f"{_shown(letter)} is none of {', '.join(f'{k} ({v})' for k, v in values.items())}")
        return [values[letter] for letter in text]

    def _list(self, key: str, length: int | None) -> list[Any]:
        value = self.value(key)
        if not isinstance(value, list):
            self.refuse(key, None, f"{_shown(value)} is not a list")
        if length is not None:
            self._same(key, len(value), length)
        return value

    def _same(self, key: str, entries: int, length: int) -> None:
        if entries != length:
            self.refuse(key, None, f"{entries} entries, but the columns beside it have {length}")


def _is_amount(value: object) -> bool:
    if type(value) is int:
        return 0 <= value <= MOST
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def _no_int(value: object, low: int, high: int) -> str:
    if high < low:
        return f"{_shown(value)} leads nowhere: there is nothing of its kind"
    return f"{_shown(value)} is not a whole number in {low}..{high}"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."
