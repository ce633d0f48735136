"""`python -m benchmarks hosts`: what is recorded is as promised, and one fault through the command where there can be hosts."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

if not distributed.is_available() or not distributed.is_gloo_available() or sys.platform != "linux":
    pytest.skip("no gloo, or no network namespaces", allow_module_level=True)

from benchmarks.lib.paths import ROOT
from benchmarks.robustness.hosts import FAULTS, FILE, NAMES, faults_of, impossible, table

RECORDED = json.loads(FILE.read_text())


def test_recorded() -> None:
    assert set(RECORDED["cases"]) == set(NAMES) and set(RECORDED["faults"]) <= set(FAULTS)
    assert faults_of(RECORDED) == []
    assert table(RECORDED) in (ROOT / "docs" / "measurements" / "hosts.md").read_text()


def test_the_judge_finds_what_is_not_as_promised() -> None:
    wrong = copy.deepcopy(RECORDED)
    rows = wrong["cases"]["ddp"][3]
    rows["min"]["state"], rows["bytes"]["measured_nbytes"] = "other bits", rows["bytes"]["budget_nbytes"] + 1
    fault = wrong["faults"]["running"]
    fault["all_ended_seconds"] = 61.0
    fault["ranks"]["0"]["error"] = fault["ranks"]["0"]["error"].replace("rank 3", "rank 2, 3")
    del fault["ranks"]["1"]
    found = faults_of(wrong)
    begins = [
        "ddp, rank 3, min: not the bits",
        "ddp, rank 3, bytes: not within",
        "killed running: rank 0 does not name",
        "killed running: rank 1 does not name",
        "killed running: processes ended after 61.0 s",
    ]
    assert len(found) == len(begins) and all(map(str.startswith, found, begins)), found


@pytest.mark.long
def test_a_rank_is_killed_on_the_other_host(tmp_path: Path) -> None:
    why = impossible()
    if why is not None:
        pytest.skip(why)
    results = tmp_path / "hosts.json"
    command = [sys.executable, "-m", "benchmarks", "hosts", "--cases", "--faults", "running", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(results.read_text())["faults"]["running"]["ranks"]) == {"0", "1", "2"}
