"""Read JSON files from anywhere safely, and write them completely or not at all. Never uses pickle.

A plan, graph or profile may come from another machine or person, so a file is checked before it is used. `read` and `parse`
accept a subset of JSON that all readers understand in the same way: UTF-8, an object at the top, no key twice in an object, no
NaN or infinity, and limits on size, nesting and the length of a number. Everything else raises PlanFileError with the file, the
position and the reason. `write` refuses what `read` would refuse.

The checks of a valid file run at C speed. Only an invalid file is walked in Python (`_problems`), to find the position.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from itertools import accumulate
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from pathlib import Path
from typing import Any, NoReturn

from lightning_memopt.errors import PlanFileError
from lightning_memopt.files import check_target as check_file
from lightning_memopt.files import reason, replace_file
from lightning_memopt.units import format_nbytes

MAX_NBYTES = 64 << 20
MAX_DEPTH = 64
MAX_INT_DIGITS = 20  # 2**64 has 20
MAX_FLOAT_CHARS = 100

_CHUNK_NBYTES = 1 << 20
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TOKEN = re.compile(r'["\[\]{},:]|NaN|-?Infinity|-?[0-9][0-9.eE+-]*')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(Exception):
    """A value of well-formed JSON is not accepted. The text says why; `_refuse` adds the position."""


def read(path: str | os.PathLike[str], *, max_nbytes: int = MAX_NBYTES) -> dict[str, Any]:
    """The object in the JSON file at `path`, of at most `max_nbytes` bytes. Raises PlanFileError."""
    name = _shown(path)
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise PlanFileError(f"{name} is not a regular file; give the path of a JSON file")
            data = file.read(max_nbytes + 1)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"{name} cannot be read: {_reason(error)}; check the path") from error
    if len(data) > max_nbytes:
        raise _too_large(name, max(status.st_size, len(data)), max_nbytes)
    return parse(data, name=name, max_nbytes=max_nbytes)


def parse(data: bytes | str, *, name: str = "the JSON text", max_nbytes: int = MAX_NBYTES) -> dict[str, Any]:
    """The object in the JSON text `data`; messages call it `name`. Raises PlanFileError."""
    if isinstance(data, str):
        data = data.encode("utf-8", errors="surrogatepass")  # decoded strictly below, with the position
    if len(data) > max_nbytes:
        raise _too_large(name, len(data), max_nbytes)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        raise PlanFileError(f"{name} is not UTF-8 at {where}: it is not JSON text, or it is damaged; make it again") from None
    if _depth(data) > MAX_DEPTH:
        _refuse(name, text, f"nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
        if _SURROGATE.search(data):
            _check_surrogates(text)
    except _Refused as refused:
        _refuse(name, text, str(refused))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (character {error.pos})"
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        problem = error.msg.removesuffix(" at")
        hint = "; the file looks truncated: copy or make it again" if ended else ""
        raise PlanFileError(f"{name} is not JSON: {problem} at {where}{hint or '; make the file again'}") from None
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        kind = kinds.get(type(value), "a number")
        raise PlanFileError(f"{name} holds {kind} at its top level; a plan, trace or profile is an object: give one, {{...}}")
    return value


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise PlanFileError, before long work rather than after it, if `write` could write no file there."""
    with writing(path):
        check_file(Path(path))


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context for writing the file at `path`, in which errors become PlanFileErrors."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise PlanFileError(f"{_shown(path)} cannot be written: {_reason(error)}; check the path") from error


def write(path: str | os.PathLike[str], obj: dict[str, Any], *, indent: int | None = None) -> None:
    """Write `obj` as JSON to `path`, atomically: readers find the old file or the new one, never a part of it.

    Only the owner may read and write the file (mode 0600). A symlink at `path` is replaced, not followed. Raises PlanFileError
    if `read` would not accept `obj`, or if the file cannot be written; then `path` is unchanged.
    """
    name = _shown(path)
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(obj, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanFileError(f"{name} cannot be written: {_reason(error)}; leave it out of the file") from error
    data = text.encode("ascii") + b"\n"
    parse(data, name=f"what would be written to {name}", max_nbytes=MAX_NBYTES)
    with writing(path):
        replace_file(Path(path), data)


def _depth(data: bytes) -> int:
    """The deepest nesting of brackets outside of strings, without recursion; exact up to the first character that is not JSON.

    Escape pairs are removed first (a backslash is legal only inside a string), so each quote left begins or ends a string.
    """
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    deepest = depth = inside = 0
    for start in range(0, len(bare), _CHUNK_NBYTES):  # in chunks: splitting a whole file of quotes takes gigabytes
        pieces = bare[start : start + _CHUNK_NBYTES].split(b'"')
        brackets = b"".join(pieces[inside::2]).translate(None, _NOT_BRACKETS)
        if (len(pieces) - 1) % 2:  # an odd number of quotes: the next chunk begins on the other side
            inside = 1 - inside
        deepest = max(deepest, max(accumulate(map(_STEP.__getitem__, brackets), initial=depth)))
        depth += sum(_STEP[bracket] * brackets.count(bracket) for bracket in _STEP)
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key appears twice in one object")
    return value


def _int(text: str) -> int:
    if len(text.lstrip("-")) > MAX_INT_DIGITS:
        raise _Refused(f"an integer longer than {MAX_INT_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text) if len(text) <= MAX_FLOAT_CHARS else math.inf
    if math.isinf(value):
        raise _Refused(f"a number beyond a float's range, or longer than {MAX_FLOAT_CHARS} characters")
    return value


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _check_surrogates(text: str) -> None:
    for _, problem in _problems(text):
        raise _Refused(problem)


def _refuse(name: str, text: str, problem: str) -> NoReturn:
    """Raise PlanFileError for `problem`, with the position of the first problem in `text`."""
    position, problem = next(_problems(text), (0, problem))
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    raise PlanFileError(f"{name}, line {line} column {column} (character {position}): {problem}; refused: make the file again")


def _problems(text: str) -> Iterator[tuple[int, str]]:
    """(position, problem) of everything in `text` that `parse` does not accept, found by walking over its tokens."""
    keys: list[set[str] | None] = []  # for each open bracket: the keys so far, or None for an array
    key_next = False
    position = 0
    while match := _TOKEN.search(text, position):
        start, token, position = match.start(), match.group(), match.end()
        if token == '"':
            try:
                string, position = scanstring(text, position, True)
            except json.JSONDecodeError:
                return
            if any("\ud800" <= char <= "\udfff" for char in string):
                yield start, "half of a surrogate pair in a string"
            if key_next and keys and keys[-1] is not None:
                if string in keys[-1]:
                    yield start, f"the key {_clip(repr(string))} appears twice in one object"
                keys[-1].add(string)
                key_next = False
        elif token in "{[":
            keys.append(set() if token == "{" else None)
            key_next = token == "{"
            if len(keys) > MAX_DEPTH:
                yield start, f"nested deeper than {MAX_DEPTH} levels"
        elif token in "}]":
            if keys:
                keys.pop()
            key_next = False
        elif token == ",":
            key_next = bool(keys) and keys[-1] is not None
        elif token != ":":
            yield from ((start, str(refused)) for refused in _refusals(token))


def _refusals(token: str) -> Iterator[_Refused]:
    convert: Callable[[str], object] = _constant if token.endswith(("N", "y")) else _number
    try:
        convert(token)
    except _Refused as refused:
        yield refused
    except ValueError:
        return  # not a number at all: the JSON parser raises its own error


def _number(token: str) -> float:
    return _float(token) if any(mark in token for mark in ".eE") else _int(token)


def _too_large(name: str, size: int, cap: int) -> PlanFileError:
    return PlanFileError(
        f"{name} has {size} bytes ({format_nbytes(size)}), above the cap of {cap} bytes ({format_nbytes(cap)}); "
        "check that it is the right file"
    )


def _shown(path: object) -> str:
    try:
        return _clip(ascii(os.fspath(path)))  # type: ignore[call-overload]
    except TypeError:
        return _clip(ascii(path))


def _clip(text: str) -> str:
    return text if len(text) <= 200 else text[:100] + "..." + text[-97:]


def _reason(error: BaseException) -> str:
    return _clip(reason(error))
