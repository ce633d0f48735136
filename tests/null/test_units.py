"""Budgets as people write them: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memopt import units
from lightning_memopt.errors import BudgetError, InfeasibleError
from lightning_memopt.units import format_nbytes, host_memory_nbytes, parse_budget

DEVICE = 16 * 2**30


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8Gb", 8 * 10**9),  # case does not matter, so this is not bits
        ("1.5 GiB", 3 * 2**29),
        (" 512 MiB\n", 512 * 2**20),
        ("3kb", 3000),
        ("3 KiB", 3072),
        ("7 MB", 7 * 10**6),
        ("0.01TB", 10**10),
        (".001TiB", 2**40 // 1000),
        ("512 B", 512),
        ("1.9B", 1),
        ("80%", DEVICE * 4 // 5),
        ("12.5 %", DEVICE // 8),
        ("100%", DEVICE),
        (0.8, DEVICE * 4 // 5),
        (0.9, DEVICE * 9 // 10),
        (1.0, DEVICE),
        (Fraction(1, 2), DEVICE // 2),
        ("0.8", DEVICE * 4 // 5),
        ("auto", DEVICE * 9 // 10),
        ("AUTO", DEVICE * 9 // 10),
        (1, 1),
        (12345, 12345),
        ("12345", 12345),
        (DEVICE, DEVICE),
        ("16GiB", DEVICE),
    ],
)
def test_p28_accepted(budget: object, nbytes: int) -> None:
    assert parse_budget(budget, DEVICE) == nbytes


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("8Gbit", "in bits"),
        ("8 gigabits", "in bits"),
        ("8 bits", "in bits"),
        ("1 bit", "in bits"),
        ("10G", "write '10GB' or '10GiB'"),
        ("1.5m", "write '1.5MB' or '1.5MiB'"),
        ("10Gi", "write '10GiB'"),
        ("8 gigabytes", "an unknown unit"),
        ("8GiBs", "an unknown unit"),
        ("-8GiB", "not positive"),
        (-1, "not positive"),
        (-0.5, "not positive"),
        (0, "not positive"),
        (0.0, "not positive"),
        ("0", "not positive"),
        ("0.0GiB", "not positive"),
        ("0%", "not positive"),
        ("0.5B", "less than one byte"),
        (1e-300, "less than one byte"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        ("nan", "not a size"),
        ("inf GiB", "not a size"),
        ("", "not a size"),
        ("  ", "not a size"),
        ("GiB", "not a size"),
        ("8,5GB", "not a size"),
        ("1e9", "not a size"),
        ("1_000", "not a size"),
        ("0x10", "not a size"),
        ("8 G B", "not a size"),
        ("８GiB", "not a size"),  # full-width digit
        ("8\u212aB", "not a size"),  # Kelvin sign: lower() makes it a k
        ("9" * 5000, "not a size"),
        ("min", "before a plan is made"),
        (True, "is a bool"),
        (None, "is a NoneType"),
        (b"8GiB", "is a bytes"),
        ([8], "is a list"),
        (1.5, "above 1"),
        ("1.5", "above 1"),
        ("150%", "above 1"),
        (1 << 20_000, "above the device"),
        (10**30, "above the device"),
        ("32GiB", f"34359738368 bytes (32.00 GiB), above the device's {DEVICE} bytes (16.00 GiB)"),
        (DEVICE + 1, f"{DEVICE + 1} bytes"),
    ],
    ids=lambda value: ascii(value)[:40] if isinstance(value, str) else type(value).__name__,
)
def test_p28_refused_in_words_that_help(budget: object, words: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, DEVICE)
    message = str(caught.value)
    assert words in message
    assert "write" in message or "ask for" in message
    assert len(message) < 400


@pytest.mark.parametrize("device", [0, -1, None, True, 1.5])
def test_a_device_without_memory_is_refused(device: object) -> None:
    with pytest.raises(BudgetError, match="the device reports"):
        parse_budget("8GiB", device)  # type: ignore[arg-type]


SIZES = st.tuples(
    st.sampled_from(["", "+", "-", " "]),
    st.sampled_from(["", "0", "1", "1.5", ".5", "5.", ".", "007", "123456789", "1e3"]),
    st.sampled_from(["", " ", "\t", "\n", "_"]),
    st.sampled_from(["", *"kmgtKMGT%"]),
    st.sampled_from(["", "i", "b", "B", "ib", "iB", "bit", "%"]),
).map("".join)


UNITS = (
    {"B": 1}
    | {f"{k}iB": 2 ** (10 * i) for i, k in enumerate("KMGT", 1)}
    | {f"{k}B": 10 ** (3 * i) for i, k in enumerate("KMGT", 1)}
)
CASES = (str, str.lower, str.upper)


@given(
    st.integers(0, 2000),
    st.integers(0, 999),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(CASES),
    st.sampled_from(["", " "]),
)
def test_p28_a_size_is_its_number_times_its_unit(
    whole: int, thousandths: int, unit: str, case: Callable[[str], str], gap: str
) -> None:
    """Exactly, rounded down to whole bytes; refused where that is none, or more than the device has."""
    text = case(f"{whole}.{thousandths:03}{gap}{unit}")
    nbytes = (1000 * whole + thousandths) * UNITS[unit] // 1000
    if 1 <= nbytes <= DEVICE:
        assert parse_budget(text, DEVICE) == nbytes
    else:
        with pytest.raises(BudgetError):
            parse_budget(text, DEVICE)


@given(st.one_of(st.text(max_size=12), SIZES))
def test_p28_any_text_is_bytes_within_the_device_or_a_budget_error(text: str) -> None:
    try:
        nbytes = parse_budget(text, DEVICE)
    except BudgetError:
        return
    assert type(nbytes) is int
    assert 1 <= nbytes <= DEVICE


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.complex_numbers(), st.decimals()))
def test_p28_any_number_is_bytes_within_the_device_or_a_budget_error(number: object) -> None:
    try:
        nbytes = parse_budget(number, DEVICE)
    except BudgetError:
        return
    assert 1 <= nbytes <= DEVICE


@given(st.integers(1, 2**50))
def test_formatted_bytes_read_back_within_their_two_decimals(nbytes: int) -> None:
    back = parse_budget(format_nbytes(nbytes), 2**52)
    assert abs(back - nbytes) <= max(1, nbytes // 99)  # just above a TiB, 0.005 TiB is half a per cent


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),  # not 1024.00 KiB
        (29 * 2**28, "7.25 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
        (-5000, "-4.88 KiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_host_memory_is_some_and_not_more_than_physical() -> None:
    import os

    assert 2**20 < host_memory_nbytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def written(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The file that names a process's groups, and the folder of these groups' files."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "membership", folder / "fs"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n", "memory.max": "8192\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, None),
        ("0::/../outside\n", {"memory.max": "123\n"}, 123),  # a container that cannot see its own group
        ("0::/\n", {}, None),
        ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "77\n"}, 77),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712),
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "77\n"}, None),
        ("0::/a:b\n", {"a:b/memory.max": "55\n"}, 55),
        ("nonsense\n0::/a\n", {"a/memory.max": "0\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_limit(tmp_path: Path, membership: str, files: dict[str, str], limit: int | None) -> None:
    assert units._cgroup_limit_nbytes(*written(tmp_path, membership, files)) == limit


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        (
            "0::/a/b\n",
            {"a/b/memory.max": "4096", "a/b/memory.current": "4000", "a/b/memory.stat": "anon 1\ninactive_file 900\n"},
            996,
        ),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "100", "a/memory.current": "30", "memory.max": "50"}, 70),
        ("0::/a\n", {"a/memory.max": "100", "a/memory.current": "30", "memory.max": "90", "memory.current": "80"}, 10),
        ("0::/a\n", {"a/memory.max": "100", "a/memory.current": "130"}, 0),
        ("0::/a\n", {"a/memory.max": "100"}, None),  # what is in use is not said
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "7"}, None),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "77",
                "memory/a/memory.usage_in_bytes": "70",
                "memory/a/memory.stat": "inactive_file 60\ntotal_inactive_file 5\n",
            },
            12,
        ),
        ("", {}, None),
    ],
)
def test_what_a_cgroup_has_left(tmp_path: Path, membership: str, files: dict[str, str], left: int | None) -> None:
    """Pages of files that nobody has used for long make room."""
    assert units.cgroup_left_nbytes(*written(tmp_path, membership, files)) == left


def test_infeasible_error_keeps_its_numbers_between_processes() -> None:
    error = InfeasibleError("too small", smallest_nbytes=5, budget_nbytes=3, tiers={"host": 7})
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.smallest_nbytes, back.budget_nbytes, back.tiers) == ("too small", 5, 3, {"host": 7})
