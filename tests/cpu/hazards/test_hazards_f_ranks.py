"""Two real processes with gloo between them (tests/cpu/lib/two_ranks.py): F4, F5, L7. All is exact or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.lib.ranks_sizes import LARGEST, SAMPLES, SCALED
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.two_ranks import WORLD, WRAPPERS
from tests.cpu.lib.written import needs_gloo, of_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: both end, and well."""
    return of_ranks(WORLD, "two_ranks", tmp_path_factory.mktemp("ranks"), timeout=500, by=package_interpreter)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_f4_the_wrapped_model_trains_exactly(ranks: list[dict[str, Any]], wrapper: str) -> None:
    """EXACT: without updates in backward, and with "auto", which says why it leaves them out: the bits of the plain wrapper."""
    for found in ranks:
        plain, *others = (found["in_loops"][wrapper][how] for how in ("plain", "never", "auto", "within"))
        assert plain["alike"]
        for other in others:
            assert other["state"] == plain["state"] and other["alike"]
            assert other["planned"] > 0
        assert all(other["updates"] == 0 for other in others if other is not others[1])
    never, auto, within = (ranks[0]["in_loops"][wrapper][how]["said"] for how in ("never", "auto", "within"))
    assert "updated after backward, as usual" not in never
    assert within.count("updated after backward, as usual") == 1 and "reduced over several processes" in within
    assert auto.count("updated after backward, as usual") == (wrapper == "views")
    assert not ranks[1]["in_loops"][wrapper]["never"]["said"], "one rank is enough to say it"


def test_f4_always_is_refused(ranks: list[dict[str, Any]]) -> None:
    """REFUSE: a model that is given without its wrapper, also where ranks come after the run began."""
    for found in ranks:
        wrapper, within = found["in_loops"]["refused"]
        assert wrapper[0] == "nothing" and within[0] == "UpdatesInBackwardError" and "over several processes" in within[1]
        assert found["begun_before"]["auto"] == ["nothing", "", True]
        name, message, alike = found["begun_before"]["always"]
        assert name == "UpdatesInBackwardError" and "over several processes" in message and alike


def test_f4_trainers(ranks: list[dict[str, Any]]) -> None:
    """EXACT: every way to a budget on two devices trains as DDP does, with updates in backward, too."""
    for number, outcomes in enumerate(ranks):
        trainers = outcomes["in_trainers"]
        plain = trainers["plain"]
        assert trainers["always"] == ["nothing", ""]
        assert trainers["auto"]["state"] == plain["state"] and trainers["auto"]["updates"] > 0
        for name, fitted in trainers["ours"].items():
            assert fitted["state"] == plain["state"], (number, name)
            assert fitted["planned"][0] > 0 and fitted["updates"] == 0
        classes = [fitted["strategy"] for fitted in trainers["ours"].values()]
        assert classes == ["MemOptDDPStrategy"] * 3 + ["DDPStrategy"]
        assert trainers["strings"] == ["MemOptDDPStrategy"] * 2


def test_f5_sharded_models_are_refused(ranks: list[dict[str, Any]]) -> None:
    """REFUSE FSDP1 by name, whatever the mode, the model or a part of it; nothing was touched, and both ranks train on."""
    for found in ranks:
        kind = "is split over processes by FullyShardedDataParallel"
        for part, name in ((False, f"the model {kind}"), (True, f"4 {kind}")):
            *modes, trains = found["sharded"][str(part)]
            assert trains and [kind for kind, _ in modes] == ["UnsupportedError"] * 3
            assert all(name in message for _, message in modes)


def of_searches(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What both ranks' searches came to. Everything else is as it was, and no rank waited long for another."""
    searches = [found["searches"]["loops"][name] for found in ranks]
    assert all(search["untouched"] and search["seconds"] < 60 for search in searches), searches
    return searches


@pytest.mark.parametrize("name", ["less room on 1", "less room on 0", "plans", "static", "views"])
def test_l7_all_ranks_come_to_the_size_of_the_rank_with_less_room(ranks: list[dict[str, Any]], name: str) -> None:
    """The peak keeps the smallest budget. All ranks ran the same trials."""
    first, second = of_searches(ranks, name)
    assert first["size"] == second["size"] and first["sizes"] == second["sizes"], (first, second)
    assert first["peak"] == second["peak"] <= first["budget"] == second["budget"] == 300_000
    assert f"-> {first['size']} on each of 2 ranks" in first["said"] == second["said"]
    same = of_searches(ranks, "same")[0]["size"]
    assert first["size"] > same if name == "plans" else first["size"] == pytest.approx(same, rel=0.02)


@pytest.mark.parametrize("name", ["out of memory", "out of memory, plans"])
def test_l7_memory_that_runs_out_on_one_rank_is_no_deadlock(ranks: list[dict[str, Any]], name: str) -> None:
    for search in of_searches(ranks, name):
        assert 0.98 * LARGEST <= search["size"] <= LARGEST and max(search["sizes"]) > LARGEST


def test_l7_the_rank_with_fewest_samples_decides(ranks: list[dict[str, Any]]) -> None:
    assert [search["size"] for search in of_searches(ranks, "few samples")] == [SAMPLES, SAMPLES]


@pytest.mark.parametrize(("name", "failed"), [("raises", 1), ("raises, plans", 0)])
def test_l7_an_error_of_one_rank_ends_the_search_on_all(ranks: list[dict[str, Any]], name: str, failed: int) -> None:
    searches = of_searches(ranks, name)
    assert searches[failed]["error"] == "ValueError: the shard is empty"
    other = searches[1 - failed]["error"]
    assert other.startswith(f"RankFailedError: Rank {failed} failed") and "ValueError: the shard is empty" in other


def test_l7_where_no_size_fits_one_rank_all_hear_which(ranks: list[dict[str, Any]]) -> None:
    for search in of_searches(ranks, "nothing fits"):
        assert "InfeasibleError: No batch size fits 30000 bytes" in search["error"] and "on rank 1:" in search["error"]


def test_l7_what_ranks_cannot_search_is_refused(ranks: list[dict[str, Any]]) -> None:
    """REFUSE: a model that is not wrapped, options that differ, steps that are repeated by the clock, a search in `Join`."""
    for number, found in enumerate(ranks):
        names = ("other options", "energy", "in Join", "not wrapped")
        options, energy, joined, alone = (of_searches(ranks, name)[number] for name in names)
        assert "UnsupportedError: A search inside of `Join`" in joined["error"] and not joined["sizes"]
        assert "ConfigError: Rank 1 searches with effective=9, and rank 0 with effective=8" in options["error"]
        assert "UnsupportedError: mode='energy'" in energy["error"] and "Give watts=" in energy["error"]
        assert f"UnsupportedError: This is rank {number} of 2" in alone["error"]
        assert not options["sizes"] and not energy["sizes"] and not alone["sizes"]
        assert not found["searches"]["left"], "posts are left in the store of the process group"


@pytest.mark.parametrize("name", SCALED)
def test_l7_trainers_on_all_ranks_train_with_one_size(ranks: list[dict[str, Any]], name: str) -> None:
    """EXACT: the plain DDP run with that size written down. The samples an update stay the same."""
    first, second = (found["searches"]["trainers"][name] for found in ranks)
    assert first == second and first["alike"] and first["steps"] == 2
    assert first["size"] > 4 and "40 samples an update on each rank, 80 on all" in first["said"]
