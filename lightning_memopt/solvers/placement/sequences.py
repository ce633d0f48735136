"""Small numbers for the search: random ones, limits of tries, and sums of some of a few terms; the same as in C++."""

from __future__ import annotations

import math
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_MOST_STEPS = 2000
"""Steps after which `reaches` gives up."""


class Generator:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        """The next number of 64 bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


def luby(i: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ...: limits that double now and then (Luby, Sinclair and Zuckerman, 1993)."""
    while True:
        k = i.bit_length()
        if i == (1 << k) - 1:
            return 1 << (k - 1)
        i -= (1 << (k - 1)) - 1


def gcd_of(sizes: Iterable[int]) -> int:
    """The greatest common divisor."""
    return math.gcd(*sizes)


def reaches(terms: list[int], least: int, most: int) -> bool:
    """Whether some of the terms, perhaps none, sum up to `least .. most`; True, too, if that takes too long to say."""
    terms = sorted(terms, key=lambda term: (-abs(term), -term))
    ups, downs = [0], [0]  # the most and the least that the terms from each one on add
    for term in reversed(terms):
        ups.append(ups[-1] + max(term, 0))
        downs.append(downs[-1] + min(term, 0))
    ups.reverse()
    downs.reverse()
    steps = _MOST_STEPS

    def sums(i: int, total: int) -> bool:
        nonlocal steps
        if least <= total <= most:
            return True
        if total + ups[i] < least or total + downs[i] > most:
            return False
        steps -= 1
        return steps < 0 or sums(i + 1, total + terms[i]) or sums(i + 1, total)

    return sums(0, 0)
