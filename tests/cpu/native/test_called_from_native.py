"""What native code calls is kept away from dynamo: a call of it has no Python frame of ours above it, which would do that."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import lightning_memopt
from lightning_memopt import optimize
from lightning_memopt.native import engine
from lightning_memopt.record import numeric_flags
from lightning_memopt.record.uncompiled import MARKED
from lightning_memopt.runtime import Handle, Kept, PlannedEngine
from lightning_memopt.runtime.engine.matching import Matcher
from lightning_memopt.runtime.engine.planned_holdings import PlannedHoldings
from tests.cpu.native.test_interrupts import X, made

PACKAGE = str(Path(lightning_memopt.__file__).parent)
SOURCES = Path(engine.__file__).parent


def named_in(source: str, pattern: str) -> set[str]:
    """The methods that a source calls by name."""
    names = set(re.findall(pattern, (SOURCES / source).read_text()))
    assert names
    return names


CALLED = {
    **{f"Matcher.{name}": getattr(Matcher, name) for name in named_in("matching.cpp", r'call_method\(\w+, "(\w+)"')},
    **{
        f"{cls.__name__}.{name}": getattr(cls, name)
        for source in ("hooks.cpp", "packing.cpp", "backward.cpp")
        for name in named_in(source, r'\.attr\("(\w+)"\)')
        for cls in (PlannedEngine, Kept, Handle)
        if callable(getattr(cls, name, None))
    },
    "Handle.__del__": Handle.__del__,
    "PlannedHoldings.free": PlannedHoldings.free,  # named by a variable in backward.cpp
    "PlannedHoldings.let_go": PlannedHoldings.let_go,
    "numeric_flags": numeric_flags,
}


@pytest.mark.parametrize("name", sorted(CALLED))
def test_what_its_sources_call_is_marked(name: str) -> None:
    assert CALLED[name].__code__ in MARKED


def test_all_that_runs_in_a_planned_step_is_marked() -> None:
    """A function of ours, or one that it was called by, directly or not."""
    bare: set[str] = set()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and not is_covered(frame):
            bare.add(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_name}")

    model, optimizer = made()
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False):
        for i in range(6):
            sys.setprofile(seen if i == 4 else None)
            model(X).backward()
            sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
    assert not bare, "\n".join(sorted(bare))


def is_covered(frame: FrameType) -> bool:
    above: FrameType | None = frame
    code: CodeType = frame.f_code
    while above is not None:
        if MARKED.get(above.f_code, False):
            return True
        above = above.f_back
    return code in MARKED
