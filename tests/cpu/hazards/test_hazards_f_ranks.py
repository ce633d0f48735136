"""Two real processes with gloo between them (tests/cpu/lib/ranks.py): F4, F5, L7. Everything is refused by name or exact."""

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
from tests.cpu.lib.ranks import WORLD, WRAPPERS

ROOT = Path(lightning_memopt.__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: both end, and well."""
    folder = tmp_path_factory.mktemp("ranks")
    env = {k: v for k, v in os.environ.items() if k != "MEMOPT_DISABLE"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cpu.lib.ranks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(WORLD)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_f4_the_wrapped_model_trains_exactly(ranks: list[dict[str, Any]], wrapper: str) -> None:
    """EXACT: without updates in backward, and with "auto", which says why it leaves them out: the bits of the plain wrapper."""
    for found in ranks:
        plain, *others = (found["in_loops"][wrapper][how] for how in ("plain", "never", "auto", "within"))
        assert plain["alike"]
        for other in others:
            assert other["state"] == plain["state"] and other["alike"]
            assert other["planned"] > 0 and other["updates"] == 0
    never, auto, within = (ranks[0]["in_loops"][wrapper][how]["said"] for how in ("never", "auto", "within"))
    assert "updated after backward, as usual" not in never
    assert auto.count("updated after backward, as usual") == within.count("updated after backward, as usual") == 1
    assert "DistributedDataParallel reduces gradients" in auto and "reduced over several processes" in within
    assert not ranks[1]["in_loops"][wrapper]["never"]["said"], "one rank is enough to say it"


def test_f4_always_is_refused(ranks: list[dict[str, Any]]) -> None:
    """REFUSE: whether the wrapper is given or what is in it, and where ranks come after the run began."""
    for found in ranks:
        wrapper, within = found["in_loops"]["refused"]
        assert wrapper[0] == within[0] == "UpdatesInBackwardError"
        assert "DistributedDataParallel reduces" in wrapper[1] and "over several processes" in within[1]
        assert found["begun_before"]["auto"] == ["nothing", "", True]
        name, message, alike = found["begun_before"]["always"]
        assert name == "UpdatesInBackwardError" and "over several processes" in message and alike


def test_f4_trainers(ranks: list[dict[str, Any]]) -> None:
    """EXACT: every way to a budget on two devices trains as DDP does. REFUSE: "always"."""
    for number, outcomes in enumerate(ranks):
        trainers = outcomes["in_trainers"]
        plain = trainers["plain"]
        assert trainers["always"][0] == "UpdatesInBackwardError" and "Parallel reduces gradients" in trainers["always"][1]
        assert trainers["auto"]["state"] == plain["state"] and trainers["auto"]["updates"] == 0
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


def test_l7_no_rank_looks_for_a_batch_size(ranks: list[dict[str, Any]]) -> None:
    """REFUSE, in every rank: each would come to a size of its own."""
    for number, found in enumerate(ranks):
        for name, message in found["sizes"].values():
            assert name == "UnsupportedError" and f"rank {number} of 2" in message
        name, message = found["in_trainers"]["scaler"]
        assert name == "UnsupportedError" and "this Trainer has 2" in message
