"""The map from storages to versions of the native engine does what a dictionary does, as far as it is used."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from lightning_memopt.native import engine
from lightning_memopt.runtime import install_native


class Thing:
    """What a map holds here."""


@pytest.fixture
def module() -> Any:
    install_native(print)
    module = engine.loaded()
    if module is None:
        pytest.skip("the native engine is not there")
    return module


def test_it_does_what_a_dictionary_does(module: Any) -> None:
    draw, own, expected = random.Random(1), module.Storages(), dict[int, Thing]()
    keys = [64 * draw.randrange(1 << 40) for _ in range(300)]
    for _ in range(5000):
        key = draw.choice(keys)
        if key in expected and draw.random() < 0.4:
            del own[key], expected[key]
        else:
            own[key] = expected[key] = Thing()
        probe = draw.choice(keys)
        assert own.get(probe) is expected.get(probe) and (probe in own) == (probe in expected)
        assert len(own) == len(expected)
    assert dict(own.items()) == expected
    own.clear()
    assert len(own) == 0 and own.items() == []


def test_it_raises_what_a_dictionary_raises(module: Any) -> None:
    own = module.Storages()
    for missing in (lambda: own[16], lambda: own.__delitem__(16)):
        with pytest.raises(KeyError, match="16"):
            missing()
    for wrong in (lambda: own["a"], lambda: own.get(1.5), lambda: "a" in own, lambda: own.__setitem__(None, own)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(OverflowError):
        own.get(-1)
    with pytest.raises(RuntimeError, match="Storages"):
        module.fresh(torch.ones(2), {})


def test_it_keeps_its_values_and_lets_go_of_them(module: Any) -> None:
    own, things = module.Storages(), [Thing() for _ in range(4)]
    refs = [weakref.ref(thing) for thing in things]
    own[16], own[32], own[48], own[64] = things
    del things
    assert all(ref() is not None for ref in refs)
    own[16] = Thing()
    assert refs[0]() is None
    del own[32]
    assert refs[1]() is None
    pairs = own.items()
    own.clear()
    assert refs[2]() is not None
    del pairs
    assert refs[2]() is None and refs[3]() is None
    own[16] = thing = Thing()
    ref = weakref.ref(thing)
    del own, thing
    gc.collect()
    assert ref() is None
