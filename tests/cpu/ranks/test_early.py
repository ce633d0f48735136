"""Updates in backward in real processes with gloo between them (tests/cpu/lib/early_ranks.py): F4, F5.

Everything is exact or refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_memopt.native import install
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.written import needs_gloo, of_ranks

pytestmark = [needs_gloo, pytest.mark.long]
DDP, SHARDED = ("default", "static", "unused", "accumulates"), ("sharded", "holds sync", "sharded budget")
LIGHTNING = ("lightning, DDP", "lightning, FSDP2")
OTHERS = ("views", "joined", "resumed", "auto and never", "refused", "clips on one")


def run(by: Interpreter, folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: all end, and well."""
    return of_ranks(world, "early_ranks", folder, str(world), *cases, timeout=500, by=by)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> list[dict[str, Any]]:
    return run(package_interpreter, tmp_path_factory.mktemp("ranks"), 2, *DDP, *SHARDED, *LIGHTNING, *OTHERS)


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


def test_f4_three_ranks(tmp_path: Path, package_interpreter: Interpreter) -> None:
    """EXACT: a mean over three ranks shows how it is rounded, one over two or four does not; and three shards are uneven."""
    for found in run(package_interpreter, tmp_path, 3, "default", "sharded"):
        for case in found.values():
            same(case)


@pytest.mark.parametrize("name", ["views", *DDP, *SHARDED])
def test_f4_f5_peaks_are_predicted(ranks: list[dict[str, Any]], name: str) -> None:
    if install() is None:
        pytest.skip("no native counter")
    for found in ranks:
        early = found[name]["early"]
        for peak in (early["measured"], early["peak"]):
            assert peak == pytest.approx(early["predicted"], rel=0.01)
        if name == "sharded budget":
            assert early["peak"] <= found[name]["budget"]


@pytest.mark.parametrize("name", LIGHTNING)
def test_f4_f5_in_lightning(ranks: list[dict[str, Any]], name: str) -> None:
    """EXACT under `MemOptDDPStrategy` and `MemOptModelParallelStrategy`, with the peak as predicted."""
    for found in ranks:
        same(found[name])
        if install() is not None:
            assert found[name]["early"]["measured"] == pytest.approx(found[name]["early"]["predicted"], rel=0.01)


def test_f4_resume(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(set(found["resumed"].values())) == 1


def test_f4_ranks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    """A rank that can or will not update early keeps all from it: with "always" all raise, and with "auto" a line says so."""
    for found in ranks:
        mixed = found["auto and never"]
        assert mixed["early"]["state"] == mixed["plain"]["state"] and mixed["early"]["updates"] == 0
        name, message = found["clips on one"]
        assert name == "UpdatesInBackwardError" and "Check rank 1:" in message and "_foreach_norm" in message
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


def test_f4_join(ranks: list[dict[str, Any]]) -> None:
    """A run inside of `Join`, and the reverse, with more batches on one rank: EXACT with "auto", REFUSED with "always"."""
    for found in ranks:
        for plain, auto, always in found["joined"]:
            assert auto == plain
            assert always[0] == "UpdatesInBackwardError" and "inside of Join" in always[1]


@pytest.mark.parametrize(("name", "text"), [("auto, hook", "communication hook"), ("auto, views", "free nothing")])
def test_f4_auto_declines_in_one_line(ranks: list[dict[str, Any]], name: str, text: str) -> None:
    for found in ranks:
        case = found["refused"][name]
        assert case["early"]["state"] == case["plain"]["state"] and case["early"]["updates"] == 0
    said = ranks[0]["refused"][name]["early"]["said"]
    assert said.count("as usual") == 1 and text in said
