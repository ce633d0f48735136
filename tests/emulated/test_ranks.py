"""DDP and FSDP2 over two cards, one for each of two processes with gloo between them (ranks.py): the bits of the plain run."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.emulated import device
from tests.emulated.ranks import CASES, STEPS, WARMUP, WORLD

pytestmark = [
    pytest.mark.skipif(not device.is_emulated(), reason="the emulated device: make emulated"),
    pytest.mark.skipif(not device.is_bits(), reason="memory has no values in bytes mode"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: all end, and well."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.emulated.ranks", str(folder)]
    done = device.run(command, seconds=900, EMULATED_DEVICES=str(WORLD), EMULATED_RACES="1")
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_run(ranks: list[dict[str, Any]], name: str) -> None:
    """In each step, and all that is left at the end. The plain run is repeatable, so that this says something."""
    for found in (rank["cases"][name] for rank in ranks):
        plain, again, planned = found["plain"], found["again"], found["planned"]
        assert len(set(plain["losses"])) == len(plain["losses"]) == (WARMUP + STEPS) * CASES[name].parts, "it does not learn"
        assert len(set(plain["gradients"])) == (0 if CASES[name].updates_early else WARMUP + STEPS)
        for what in ("losses", "gradients", "state"):
            assert plain[what] == again[what] and plain[what] == planned[what], what
        assert planned["phase"] == "planned" and not planned["deviates"] and planned["rebuilt"] > 0
        assert planned["peak"] < 0.8 * plain["peak"]
        if name.startswith("DDP"):  # FSDP2's depends on when its streams give back
            assert planned["peak"] == pytest.approx(planned["predicted"], rel=0.01)
        assert (planned["early"] > 0) == CASES[name].updates_early


def test_ranks_differ_where_they_ought_to(ranks: list[dict[str, Any]]) -> None:
    """Each has a batch of its own. DDP's gradients and parameters are those of both; a shard is its rank's."""
    one, other = (rank["cases"] for rank in ranks)
    assert one["DDP"]["planned"]["losses"] != other["DDP"]["planned"]["losses"]
    assert one["DDP"]["planned"]["gradients"] == other["DDP"]["planned"]["gradients"]
    assert one["FSDP2"]["planned"]["gradients"] != other["FSDP2"]["planned"]["gradients"]


def test_every_access_is_ordered(ranks: list[dict[str, Any]]) -> None:
    assert [rank["races"] for rank in ranks] == [0] * WORLD
