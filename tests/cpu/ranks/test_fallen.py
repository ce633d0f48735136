"""Two real processes under each front, one of which fails (tests/cpu/lib/fallen.py): the other names it, nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
from tests.cpu.lib.fallen import CASES, KILLS
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.written import needs_gloo, written

pytestmark = [needs_gloo, pytest.mark.long]
BOUND_SECONDS = 60.0
SHARED = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> Path:
    """Where each rank of each case wrote what it ended with. No process hung."""
    folder = tmp_path_factory.mktemp("fallen")
    written("fallen", folder, by=package_interpreter, timeout=900)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_n6_under_every_front(folder: Path, case: str) -> None:
    """Kills while observing, solving and running, a forward that raises, a budget that one rank cannot keep, and a normal end.

    Nothing is left in the process, the store of the group, shared memory or the folder for temporary files; with DDP in
    Lightning, tensors are on a disk.
    """
    fault = case.split(".")[1]
    paths = [folder / f"{case}.{rank}.json" for rank in range(2)]
    ends = [json.loads(path.read_text()) for path in paths if path.exists()]
    assert len(ends) == (1 if fault in KILLS else 2), "a rank that was killed writes nothing; the others do"
    for end in ends:
        assert not end["left"]
        assert not SHARED.exists() or not [path.name for path in SHARED.iterdir() if str(end["pid"]) in path.name]
    assert not list((folder / case).iterdir())
    errors = [end["error"] for end in ends]
    if fault == "none":
        assert errors == ["", ""]
    elif fault == "infeasible":
        assert all("InfeasibleError: The budget is infeasible on rank 1 of 2" in error for error in errors)
        assert [end["forwards"] for end in ends] == [1, 1], "before the first update"
    else:
        told = ["Rank 1 failed, so all ranks end: ValueError: the shard is empty"]
        whys = told if fault == "raises" else ["rank 1 did not say why: its process has ended", "Rank 1 has been silent for"]
        assert errors[0].startswith("RankFailedError") and any(why in errors[0] for why in whys)
        assert errors[1:] == (["ValueError: the shard is empty"] if fault == "raises" else [])
        assert ends[0]["ended"] - float((folder / f"{case}.failed").read_text()) < BOUND_SECONDS
