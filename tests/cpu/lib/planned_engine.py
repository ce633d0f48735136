"""Engines for tests that carry out a program themselves, over several steps."""

from typing import Any

from lightning_memopt.runtime import Learned, PlannedEngine, Program


def engine_of(program: Program, sized: bool = True, **options: Any) -> PlannedEngine:
    """An engine of one more step under the program; it knows what the steps before taught. `sized`: see `Learned`."""
    known = vars(program).setdefault("_learned_in_tests", {})  # it is gone with the program
    if sized not in known:
        known[sized] = Learned(program, sized)
    return PlannedEngine(known[sized], **options)
