"""Updates in backward in real processes with gloo between them (tests/cpu/lib/early_ranks.py): F4, F5.

Everything is exact or refused by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import lightning_memopt
from lightning_memopt.native import install
from tests.cpu.lib.sharded import Block

ROOT = Path(lightning_memopt.__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo"
)
DDP, SHARDED = ("default", "static", "unused"), ("sharded", "holds sync", "sharded budget")
OTHERS = ("views", "resumed", "auto and never", "refused", "clips on one")
LATE_NBYTES = sum(p.nbytes for p in Block().parameters())
"""Gloo's own threads let go of the buffers of a collective when they next run: those of one unit may be freed late."""


def run(folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: all end, and well."""
    env = {k: v for k, v in os.environ.items() if k != "MEMOPT_DISABLE"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cpu.lib.early_ranks", str(folder), str(world), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(world)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), 2, *DDP, *SHARDED, *OTHERS)


def same(case: dict[str, Any]) -> None:
    """Losses, parameters, optimizer state and generator are those of the plain run, and parameters were updated in backward."""
    assert case["early"]["state"] == case["plain"]["state"] and case["early"]["updates"] > 0


@pytest.mark.parametrize("name", ["views", *DDP, *SHARDED])
def test_f4_f5_early_updates_have_the_bits_of_the_plain_run(ranks: list[dict[str, Any]], name: str) -> None:
    """EXACT on every rank, under DistributedDataParallel and FSDP2. In "unused", a layer has no gradient on one rank."""
    for found in ranks:
        same(found[name])
        assert not found[name]["early"].get("left")
    if name in DDP:
        assert ranks[0][name]["early"]["weights"] == ranks[1][name]["early"]["weights"]


@pytest.mark.parametrize("world", [3, 4])
def test_f4_more_ranks(tmp_path: Path, world: int) -> None:
    """EXACT: a mean over three ranks shows how it is rounded, one over two or four does not."""
    for found in run(tmp_path, world, "default", *(("sharded",) if world == 4 else ())):
        for case in found.values():
            same(case)


@pytest.mark.parametrize("name", ["views", *DDP, *SHARDED])
def test_f4_f5_peaks_are_predicted(ranks: list[dict[str, Any]], name: str) -> None:
    if install() is None:
        pytest.skip("no native counter")
    late = LATE_NBYTES if name in SHARDED else 0
    for found in ranks:
        early = found[name]["early"]
        for peak in (early["measured"], early["peak"]):
            assert 0.99 * early["predicted"] - late < peak < 1.01 * early["predicted"] + late
        if name == "sharded budget":
            assert early["peak"] <= found[name]["budget"]


def test_f4_resume(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(set(found["resumed"].values())) == 1


def test_f4_ranks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    """A rank that can or will not update early keeps all from it: with "always" all raise, and with "auto" a line says so."""
    for found in ranks:
        mixed = found["auto and never"]
        assert mixed["early"]["state"] == mixed["plain"]["state"] and mixed["early"]["updates"] == 0
        name, message = found["clips on one"]
        assert name == "UpdatesInBackwardError" and message.startswith("Rank 1 says:") and "_foreach_norm" in message
    assert ranks[0]["auto and never"]["early"]["said"].count("as usual: another rank does so") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hook", "communication hook of yours"),
        ("clips", "_foreach_norm"),
        ("within", "Give MemOpt the model"),
    ],
)
def test_f4_refused(ranks: list[dict[str, Any]], name: str, text: str) -> None:
    """REFUSE with "always", by name."""
    for found in ranks:
        kind, message = found["refused"][name]
        assert kind == "UpdatesInBackwardError" and text in message


@pytest.mark.parametrize(
    ("name", "text"), [("auto, hook", "communication hook"), ("auto, views", "free nothing")]
)
def test_f4_auto_declines_in_one_line(ranks: list[dict[str, Any]], name: str, text: str) -> None:
    for found in ranks:
        case = found["refused"][name]
        assert case["early"]["state"] == case["plain"]["state"] and case["early"]["updates"] == 0
    said = ranks[0]["refused"][name]["early"]["said"]
    assert said.count("as usual") == 1 and text in said
