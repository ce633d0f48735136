"""What is held of a storage version: every method leads to the state that NOTE [States of a holding] says, and everything else
is refused."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_memopt
from lightning_memopt.native import engine
from lightning_memopt.record import UNKNOWN, Tape
from lightning_memopt.runtime.engine.holding import Holding, settle
from lightning_memopt.runtime.parked import Depot, ParkedTensor

DOORS: dict[str, Callable[[Holding], Any]] = {
    "hold": lambda h: h.hold(torch.ones(4)),
    "rebuilt": lambda h: h.rebuilt(torch.ones(4)),
    "drop": lambda h: h.drop(),
    "park": lambda h: h.park(parked()),
    "unpark": lambda h: h.unpark(),
}
TRANSITIONS = {
    "EMPTY": {"hold": "HELD", "rebuilt": "HELD", "drop": "EMPTY", "park": "PARKED", "unpark": "EMPTY"},
    "HELD": {"hold": "HELD", "rebuilt": "HELD", "drop": "EMPTY", "park": "COPIED", "unpark": "HELD"},
    "COPIED": {"hold": "COPIED", "rebuilt": "COPIED", "drop": "PARKED", "park": None, "unpark": "HELD"},
    "PARKED": {"hold": "COPIED", "rebuilt": "COPIED", "drop": "PARKED", "park": None, "unpark": "EMPTY"},
}


def parked() -> ParkedTensor:
    """One bit a value, on the device: it comes back bit-identical."""
    return ParkedTensor(Depot(), torch.tensor([True, False, True, True]), "bools", "a mask")


def state(holding: Holding) -> str:
    held = holding.value is not None
    return ("COPIED" if held else "PARKED") if holding.parked is not None else ("HELD" if held else "EMPTY")


@pytest.fixture(params=["Python", "native"])
def empty(request: pytest.FixtureRequest) -> Callable[[], Holding]:
    """Makes a holding: Python's, or a version of the native engine, which is its own holding."""
    if request.param == "Python":
        return Holding
    module = engine.loaded()
    if module is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    tape = Tape(Holding, module)
    return lambda: tape.version(0, torch.empty(0)).holding


def holding(empty: Callable[[], Holding], wanted: str) -> Holding:
    made = empty()
    if wanted in ("COPIED", "PARKED"):
        made.park(parked())
    if wanted in ("HELD", "COPIED"):
        made.hold(torch.ones(4))
    return made


@pytest.mark.parametrize("before", TRANSITIONS)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_leads_where_the_table_says(before: str, door: str, empty: Callable[[], Holding]) -> None:
    made, after = holding(empty, before), TRANSITIONS[before][door]
    assert state(made) == before
    if after is None:
        with pytest.raises(AssertionError, match="parked once"):
            DOORS[door](made)
        assert state(made) == before
    else:
        DOORS[door](made)
        assert state(made) == after


def test_the_counter_and_the_stream_change_with_the_value(empty: Callable[[], Holding]) -> None:
    made, t = empty(), torch.ones(4)
    made.rebuilt(t, stream := object())
    assert made.expected == t._version and made.stream is stream and made.intact
    t.add_(1)
    assert not made.intact
    made.hold(t)
    assert made.expected == UNKNOWN and made.stream is None and made.intact
    t.add_(1)
    assert made.intact, "the forward is not over"
    settle([SimpleNamespace(holding=made, counter=t._version)])
    t.add_(1)
    assert not made.intact
    settle([SimpleNamespace(holding=made, counter=t._version)])
    assert not made.intact, "the end of the forward is noted once"


def test_what_is_set_aside_comes_back_as_it_was(empty: Callable[[], Holding]) -> None:
    made, t = empty(), torch.ones(4)
    made.rebuilt(t, stream := object())
    with pytest.raises(KeyError), made.set_aside() as value:
        assert value is t and state(made) == "EMPTY"
        made.rebuilt(torch.zeros(4))
        raise KeyError
    assert made.value is t and made.expected == t._version and made.stream is stream


def test_bytes_that_come_back_bit_identical_are_fetched(empty: Callable[[], Holding]) -> None:
    made = holding(empty, "PARKED")
    assert made.reachable and made.fetch() and state(made) == "COPIED"
    assert made.value is not None and made.value.tolist() == [True, False, True, True]
    assert not empty().fetch()


def test_nothing_else_sets_what_a_holding_holds() -> None:
    """`value`, `expected`, `stream` and `parked` are set only in holding.py, except by the stream that reads (in_order)."""
    package = Path(lightning_memopt.__file__).parent
    fields = {"value", "expected", "stream", "parked"}
    setters = []
    for path in sorted((package / "runtime" / "engine").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            for target in (t for group in targets for t in ast.walk(group)):
                stored = isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if stored and target.attr in fields and path.name != "holding.py":
                    owner = target.value
                    if "holding" in ast.unparse(owner) or ast.unparse(owner) in ("before", "after"):
                        setters.append(f"{path.name}:{target.lineno}: {ast.unparse(target)}")
    assert not setters, setters
