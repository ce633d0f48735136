"""Engines for tests that carry out a program themselves, over several steps."""

from functools import lru_cache
from typing import Any

from lightning_memopt.runtime import Learned, PlannedEngine, Program

_learned = lru_cache(maxsize=16)(Learned)


def engine_of(program: Program, sized: bool = True, **options: Any) -> PlannedEngine:
    """An engine of one more step under the program; it knows what the steps before taught. `sized`: see `Learned`."""
    return PlannedEngine(_learned(program, sized), **options)
