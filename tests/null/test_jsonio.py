"""Files from anywhere: what is not accepted is refused with file and position; what is written is whole."""

from __future__ import annotations

import json
import os
import random
import stat
import time
from pathlib import Path

import pytest

from lightning_memopt import files, jsonio
from lightning_memopt.errors import PlanFileError

GOOD = {
    "schema": 1,
    "ops": [
        {"id": 0, "name": 'a "quoted" \\ [name] {', "seconds": 1.5e-3},
        {"id": 1, "name": "é\U0001f600", "seconds": 0.0},
    ],
    "nested": {"a": {"b": [[1, -2], [True, False, None]]}},
    "big": 2**64 - 1,
}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"a": [1, 2', "truncated"),
        (b'{"a": "bc', "truncated"),
        (b'{"a": 1} x', "line 1 column 10"),
        (b'{"a": 1,}', "line 1 column"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a":\n 01}', "line 2 column 3"),
        (b'{"a": "\n"}', "not JSON"),
        (b"\x80\x04\x95\x0c", "not UTF-8 at byte 0"),  # how a pickle begins
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8 at byte 7"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[]", "an array"),
        (b'"text"', "a string"),
        (b"12", "a number"),
        (b"null", "null"),
        (b"true", "true or false"),
        (b'{"a": NaN}', "line 1 column 7 (character 6): NaN"),
        (b'{"a": "NaN",\n "b": Infinity}', "line 2 column 7"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "line 1 column 7"),
        (b'{"a": [' + b"1" * 5000 + b"]}", "line 1 column 8 (character 7): an integer longer than 20 digits"),
        (b'{"a": -' + b"1" * 21 + b"}", "longer than 20 digits"),
        (b'{"a": 0.' + b"1" * 5000 + b"}", "longer than 100 characters"),
        (b'{"a": 1, "b": 2,\n "a": 3}', "line 2 column 2 (character 18): the key 'a' appears twice"),
        (b'{"k": [{"a": 1, "b": {"a": 1}}, {"a": 1, "\\u0061": 2}]}', "(character 41): the key 'a' appears twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "(character 69): nested deeper than 64"),
        (b'{"a":' * 100_000, "nested deeper than 64"),
        (b"[" * 100_000, "nested deeper than 64"),
        (b'{"a": "' + b"\\\\" * 9 + b'", "b": ' + b"[" * 100_000, "nested deeper than 64"),
        (b'["\\"", ' + b'{"a":[' * 50_000, "nested deeper than 64"),
    ],
)
def test_refused_with_file_and_position(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(PlanFileError) as caught:
        jsonio.read(path)
    assert words in str(caught.value)
    assert "plan.json" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b' {"a": {"a": [{"a": 1}, {"a": 1}]}}\n',
        b'{"a": "' + b"[{" * 1000 + b'"}',  # brackets in a string nest nothing
        b'{"a": "' + b'\\"[\\\\' * 100 + b'"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a": [' + b"[]," * 1000 + b"[]]}",
        b'{"a": "NaN", "Infinity": "-Infinity"}',
        b'{"a": "\\ud83d\\ude00"}',  # both halves of a pair
        b'{"a": 18446744073709551616, "b": -99999999999999999999, "c": 1e300, "d": -0.0}',
    ],
)
def test_accepted_as_json_reads_it(data: bytes) -> None:
    assert jsonio.parse(data) == json.loads(data)
    assert jsonio.parse(data.decode()) == json.loads(data)


def test_the_size_cap_is_on_bytes_and_both_are_said(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b'{"a": "' + b"x" * 91 + b'"}')
    assert jsonio.read(path, max_nbytes=100)
    with pytest.raises(PlanFileError, match="100 bytes .* 99 bytes"):
        jsonio.read(path, max_nbytes=99)
    sparse = tmp_path / "sparse.json"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PlanFileError, match=f"{2**40} bytes .*above the cap of 1000 bytes"):
        jsonio.read(sparse, max_nbytes=1000)


def test_what_is_not_a_readable_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe", tmp_path / "loop", "/dev/zero", "a\0b", "", None):
        with pytest.raises(PlanFileError):
            jsonio.read(path)  # type: ignore[arg-type]


def test_thousands_of_damaged_files_read_or_are_refused() -> None:
    rng = random.Random(0)
    base = json.dumps(GOOD).encode()
    pieces = [b'"', b"\\", b"[", b"{", b"}", b"]", b",", b":"]
    pieces += [b"NaN", b"1e999", b"9" * 30, b"\xff", b"\\ud800", b'"id":1,']
    refused = 0
    for _ in range(4000):
        data = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                data[start : start + rng.randint(1, 9)] = b""
            elif kind == 1:
                data[start:start] = rng.choice(pieces)
            elif kind == 2:
                data[start : start + 1] = bytes([rng.randrange(256)])
            else:
                data = data[:start] + data[start // 2 :]
        try:
            value = jsonio.parse(bytes(data))
        except PlanFileError:
            refused += 1
        else:
            assert value == json.loads(data)
    assert 2000 < refused < 4000


@pytest.mark.parametrize("unit", [b'"', b'\\"', b"\\\\", b"[],", b'"a":', b"1", b"[", b"\\"])
def test_a_hostile_megabyte_is_refused_in_linear_time(unit: bytes) -> None:
    for prefix in (b'{"a": [', b'{"a": "'):
        start = time.process_time()
        with pytest.raises(PlanFileError):
            jsonio.parse(prefix + unit * (2**18 // len(unit)))
        assert time.process_time() - start < 5


def test_write_then_read_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for indent in (None, 2):
        jsonio.write(path, GOOD, indent=indent)
        assert jsonio.read(path) == GOOD
        assert jsonio.read(str(path)) == GOOD
        assert path.read_bytes().endswith(b"}\n")


def test_written_for_the_owner_only_with_nothing_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o644)
    previous = os.umask(0)
    try:
        jsonio.write(path, GOOD)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_symlink_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "plan.json"
    for target in (victim, tmp_path / "dangling"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        jsonio.write(link, GOOD)
        assert not link.is_symlink()
        assert jsonio.read(link) == GOOD
    assert victim.read_text() == "precious"
    assert not (tmp_path / "dangling").exists()


def test_a_prepared_temporary_name_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "known")
    trap = tmp_path / ".memopt-known.tmp"
    trap.symlink_to(victim)
    with pytest.raises(PlanFileError, match="cannot be written"):
        jsonio.write(tmp_path / "plan.json", GOOD)
    assert victim.read_text() == "precious"
    assert trap.is_symlink()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    path = tmp_path / "plan.json"
    jsonio.write(path, {"old": 1})

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(jsonio.os, "fsync", fail)
    with pytest.raises(PlanFileError if isinstance(error, OSError) else KeyboardInterrupt):
        jsonio.write(path, {"new": 1})
    assert jsonio.read(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["plan.json"]


def _deep(levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


CYCLE: dict[str, object] = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    "obj",
    [
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": 10**20},
        {"a": 10**5000},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {1: "a", "1": "b"},
        {"a": "\ud800"},
        [1],
        None,
        _deep(64),
        _deep(100_000),
        CYCLE,
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, obj: object) -> None:
    with pytest.raises(PlanFileError, match="written"):
        jsonio.write(tmp_path / "plan.json", obj)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "no" / "such.json", tmp_path / "folder", "a\0b"):
        with pytest.raises(PlanFileError, match="cannot be written"):
            jsonio.write(path, GOOD)
    assert os.listdir(tmp_path) == ["folder"]
