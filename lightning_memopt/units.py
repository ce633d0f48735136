"""Read and write amounts of bytes as people do, and find the memory that this process may use on the CPU.

`parse_budget` turns text or a number into whole bytes, and `format_nbytes` turns bytes into text. `8GiB` is 2^30-based and
`8GB` is 10^9-based. Amounts are computed as exact fractions and rounded down: a budget is never rounded up.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle
from pathlib import Path, PurePosixPath

from lightning_memopt.errors import BudgetError, UnsupportedError

Budget = int
"""A budget after `parse_budget`, in whole bytes. `"min"` is not an amount of bytes; callers that accept it handle it first."""

AUTO_FRACTION = Fraction(9, 10)
"""The share of the device's memory that `"auto"` means."""

_UNIT_NBYTES = {"b": 1}
_UNIT_NBYTES |= {f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", start=1)}
_UNIT_NBYTES |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}

_AMOUNT = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z%]*)")
_MAX_TEXT_CHARS = 64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` (positive) that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def parse_budget(budget: object, device_nbytes: int, *, name: str = "budget", of: str = "the device") -> Budget:
    """The bytes (int, 1 <= result <= `device_nbytes`) that `budget` means on a device of `device_nbytes` bytes.

    Accepted: text with a unit (`"8GiB"`, `"1.5 gb"`, `"512 B"`; case does not matter), a percentage of the device
    (`"80%"`), `"auto"` (0.9 of the device), a float in (0, 1] (a share of the device) and an int (bytes). Text of a
    bare number means the same as that number: `"0.8"` is a share, `"1000"` is bytes. `"min"` is refused: its bytes are
    unknown until a planner has run, so callers handle it before. `name`, `of`: what errors call the option and the device.

    Raises BudgetError for anything else, and for more bytes than the device has.
    """
    device = _whole(device_nbytes)
    if device is None or device <= 0:
        raise BudgetError(f"{of} reports {device_nbytes!r} bytes of memory; give a device with some")
    asked = _Asked(f"{name} {_shown(budget)}", of, device)
    nbytes = math.floor(_amount(budget, asked))
    if nbytes < 1:
        raise asked.refused("is less than one byte")
    if nbytes > device:
        raise BudgetError(
            f"{asked.given} is {nbytes} bytes ({format_nbytes(nbytes)}), above {of}'s {device} bytes "
            f"({format_nbytes(device)}); ask for at most that, or for a share of it such as '90%'"
        )
    return nbytes


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, rounded up, exact for integers of any size. `denominator` is above 0."""
    return -(-numerator // denominator)


def format_nbytes(nbytes: int) -> str:
    """`nbytes` as text for people, 2^10-based with two decimals: `"7.25 GiB"`, `"512 B"`.

    The text is rounded. A message whose number may be copied as a budget must give the exact bytes too.
    """
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    if size < 1024:
        return f"{sign}{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.995:  # above it, two decimals would print 1024.00
            return f"{sign}{value:.2f} {unit}"
    return f"{sign}{value / 1024:.2f} TiB"


def host_memory_nbytes() -> int:
    """Bytes of memory this process may use on the CPU: the physical total, or its control group's limit if lower.

    Raises UnsupportedError if the system does not say how much memory it has.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = 0
    if total <= 0:
        raise UnsupportedError("this system does not say how much memory it has; give the budget in bytes instead")
    limit = _cgroup_limit_nbytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return total if limit is None else min(total, limit)


def _whole(value: object) -> int | None:
    """`value` as an int if it is an integer of any library; None for bools and everything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A budget as a user gave it.

    given: the option and its value, as text.
    of: what shares are shares of.
    nbytes: the bytes of that.
    """

    given: str
    of: str
    nbytes: int

    def refused(self, why: str) -> BudgetError:
        return BudgetError(
            f"{self.given} {why}; write '8GiB' (2^30-based), '8GB' (10^9-based), '80%' or 0.8 (of {self.of}), a whole number "
            "of bytes, or 'auto'"
        )


def _shown(budget: object) -> str:
    """The given budget as text for a message; never longer than a line."""
    if isinstance(budget, int) and budget.bit_length() > 200:  # repr() of a huge int raises, or fills the screen
        return f"a number of {budget.bit_length()} bits"
    text = repr(budget)
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 3] + "..."


def _amount(budget: object, asked: _Asked) -> Fraction:
    """The exact, positive number of bytes that `budget` means. Raises BudgetError if it means none."""
    if isinstance(budget, str):
        return _text_amount(budget, asked)
    nbytes = _whole(budget)
    if nbytes is not None:
        if nbytes <= 0:
            raise asked.refused("is not positive")
        if nbytes.bit_length() > 200:  # too long to print
            raise asked.refused(f"is above {asked.of}'s {asked.nbytes} bytes")
        return Fraction(nbytes)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise asked.refused(f"is {_article(type(budget).__name__)}, not a size")
    share = float(budget)
    if not math.isfinite(share):
        raise asked.refused("is not a finite number")
    return _share(Fraction(repr(share)), asked) * asked.nbytes  # repr: 0.9 is nine tenths, as "90%" is


def _share(share: Fraction, asked: _Asked) -> Fraction:
    """`share` unchanged. Raises BudgetError if it is not in (0, 1]."""
    if share <= 0:
        raise asked.refused("is not positive")
    if share > 1:
        raise asked.refused(f"is a share above 1 of {asked.of}; for bytes, add a unit")
    return share


def _text_amount(budget: str, asked: _Asked) -> Fraction:
    text = budget.strip().lower() if budget.isascii() and len(budget) <= _MAX_TEXT_CHARS else ""
    if text == "auto":
        return AUTO_FRACTION * asked.nbytes
    if text == "min":
        raise asked.refused("has no bytes before a plan is made, and is not accepted here")
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise asked.refused("is not a size")
    sign, digits, unit = match.groups()
    number = Fraction(digits.rstrip("."))
    if sign == "-" or number == 0:
        raise asked.refused("is not positive")
    if unit == "%":
        return _share(number / 100, asked) * asked.nbytes
    if unit == "":
        return _share(number, asked) * asked.nbytes if "." in digits else number
    if unit in _UNIT_NBYTES:
        return number * _UNIT_NBYTES[unit]
    if "bit" in unit:
        raise asked.refused("is in bits; memory is counted in bytes")
    if re.fullmatch("[kmgt]i?", unit):
        letter = unit[0].upper()
        if len(unit) == 1:
            spellings, why = [f"{letter}B", f"{letter}iB"], "ambiguous"
        else:
            spellings, why = [f"{letter}iB"], "not a unit of bytes"
        choice = " or ".join(f"'{digits}{spelling}'" for spelling in spellings)
        raise BudgetError(f"{asked.given}: {letter + unit[1:]} is {why}; write {choice}")
    raise asked.refused(f"has an unknown unit ('{unit}')")


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def cgroup_left_nbytes(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the control group of this process, and each of its ancestors, may still use; None if none has a limit. Pages
    of files that nobody has used for long make room.
    """
    left = []
    for group, limit, usage, field in _cgroup_limits(membership, root):
        used = _text_of(group / usage).strip()
        files = re.search(rf"^{field} ([0-9]+)$", _text_of(group / "memory.stat"), re.MULTILINE)
        if used.isdigit():
            left.append(max(0, limit - max(0, int(used) - (int(files[1]) if files else 0))))
    return min(left, default=None)


def _cgroup_limit_nbytes(membership: Path, root: Path) -> int | None:
    """The lowest memory limit, in bytes, of this process's control group and its ancestors; None if there is none."""
    return min((limit for _, limit, _, _ in _cgroup_limits(membership, root)), default=None)


def _cgroup_limits(membership: Path, root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Of each control group of this process that limits memory: its folder, the limit in bytes, the name of the file with the
    bytes in use, and of the field of memory.stat with those of files that make room.

    `membership` lists one group per line, `id:controllers:path` (version 2 has no controllers). The limit of every
    ancestor applies, and inside a container the listed path may not be visible. So every level up to the root is read.
    """
    for line in _text_of(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, name, more = root, "memory.max", ("memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, name, more = root / "memory", "memory.limit_in_bytes", ("memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts) + 1):
            group = top.joinpath(*parts[:depth])
            text = _text_of(group / name).strip()
            if re.fullmatch("[0-9]{1,30}", text) and int(text) > 0:  # version 2 writes "max" where there is no limit
                yield group, int(text), *more


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def divided(nbytes: int, sizes: Iterable[int]) -> list[int]:
    """`nbytes` in parts of these sizes, one after the other and again from the first, and one part for the rest."""
    parts: list[int] = []
    for size in cycle(sizes):
        if size > nbytes:
            break
        parts.append(size)
        nbytes -= size
    return [*parts, nbytes] if nbytes else parts
