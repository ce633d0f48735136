"""The native engine's containers do what Python's do, as far as they are used: a dictionary of versions, a set of numbers."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from lightning_memopt.native import engine
from lightning_memopt.record import StorageVersion, Tape
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.engine.holding import Holding


class Thing:
    """What a version holds here."""


@pytest.fixture
def module() -> Any:
    install_native(print)
    module = engine.loaded()
    if module is None:
        pytest.skip("the native engine is not there")
    return module


def made(module: Any) -> StorageVersion[Holding]:
    return Tape(Holding, module).version(0, torch.empty(1))


def held(module: Any) -> tuple[Any, weakref.ref[Thing]]:
    """A version, and a reference to what only it holds."""
    version: Any = made(module)
    version.why = thing = Thing()
    return version, weakref.ref(thing)


def test_versions_are_kept_as_by_a_dictionary(module: Any) -> None:
    draw = random.Random(1)
    own = module.Versions()
    expected = dict[int, StorageVersion[Holding]]()
    keys = [-1, 0, *draw.sample(range(2000), 100), (1 << 20) - 1, *(64 * draw.randrange(1 << 40) for _ in range(200))]
    for _ in range(5000):
        key = draw.choice(keys)
        if key in expected and draw.random() < 0.4:
            del own[key], expected[key]
        else:
            own[key] = expected[key] = made(module)
        probe = draw.choice(keys)
        assert own.get(probe) is expected.get(probe) and (probe in own) == (probe in expected)
        assert len(own) == len(expected)
    assert own.items() == list(expected.items()) and own.values() == list(expected.values())
    own.clear()
    assert len(own) == 0 and own.items() == own.values() == []


def test_versions_raise_what_a_dictionary_raises(module: Any) -> None:
    own = module.Versions()
    for missing in (lambda: own[16], lambda: own.__delitem__(16)):
        with pytest.raises(KeyError, match="16"):
            missing()
    wrong = lambda: own["a"], lambda: own.get(1.5), lambda: "a" in own, lambda: own.__setitem__(None, made(module))
    for each in (*wrong, lambda: own.__setitem__(0, own)):
        with pytest.raises(TypeError):
            each()
    with pytest.raises(OverflowError):
        own.get(1 << 64)
    with pytest.raises(RuntimeError, match="Versions"):
        module.fresh(torch.ones(2), {})
    assert len(own) == 0


def test_versions_are_kept_and_let_go_of(module: Any) -> None:
    own = module.Versions()
    things = []
    for key in (16, 32, 48, 64):
        own[key], thing = held(module)
        things.append(thing)
    assert all(thing() is not None for thing in things)
    own[16], _ = held(module)
    assert things[0]() is None
    del own[32]
    assert things[1]() is None
    pairs = own.items()
    own.clear()
    assert things[2]() is not None
    del pairs
    assert things[2]() is None and things[3]() is None
    own[16], thing = held(module)
    del own
    gc.collect()
    assert thing() is None


def test_numbers_are_kept_as_by_a_set(module: Any) -> None:
    draw = random.Random(2)
    own = module.Numbers()
    expected = set[int]()
    for _ in range(3000):
        several = [draw.randrange(-1, 200) for _ in range(draw.randrange(4))]
        number = draw.randrange(-1, 200)
        change = draw.choice(("add", "discard", "update"))
        for each in (own, expected):
            getattr(each, change)(several if change == "update" else number)
        assert (
            (number in own) == (number in expected)
            and len(own) == len(expected)
            and own.isdisjoint(several) == expected.isdisjoint(several)
        )
    assert [n for n in range(-1, 300) if n in own] == list(own) == sorted(expected) and None not in own


def test_numbers_refuse_what_they_cannot_have(module: Any) -> None:
    own = module.Numbers()
    for wrong in (-2, 1 << 40):
        with pytest.raises(ValueError, match="from -1 on"):
            own.add(wrong)
    for other in ("a", 1.5):
        with pytest.raises(TypeError):
            own.add(other)
