"""Promises over processes: the same run twice, without the package, switched off, resumed elsewhere, left in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_memopt
from lightning_memopt import optimize, versions
from tests.cpu.lib import process
from tests.cpu.lib.loops import assert_same, batches, installed, sgd, small, state, train

pytestmark = pytest.mark.long

ROOT = Path(lightning_memopt.__file__).parents[1]


def run(mode: str, folder: Path, hash_seed: str, **environment: str) -> dict[str, Any]:
    """What the process wrote; it must end well and say nothing."""
    name = {"plain": "plain", "open": "open"}.get(mode, "memopt")
    env = {k: v for k, v in os.environ.items() if k != "MEMOPT_DISABLE"}
    env |= {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's profiler warns once that it did not see all memory being allocated
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-m", "tests.cpu.lib.process", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr[-3000:]
    return json.loads((folder / f"{name}{hash_seed}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Four processes: one without the package, after two with it, and one that is switched off."""
    folder = tmp_path_factory.mktemp("runs")
    model = process.model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as attached:
        for i in range(2):
            process.step(model, optimizer, i)
        attached.save_plan(str(folder / "given.json"))
    found = {"one": run("memopt", folder, "1"), "open": run("open", folder, "2")}
    found["plain"] = run("plain", folder, "3")
    found["off"] = run("off", folder, "4", MEMOPT_DISABLE="1")
    return found


def test_p30_same_seed_same_weights(runs: dict[str, dict[str, Any]]) -> None:
    """Two processes with other hash seeds end with the same bits, and with those of the plain run; both had plans."""
    assert runs["one"]["state"] == runs["open"]["state"] == runs["plain"]["state"]
    assert runs["one"]["planned"] and runs["open"]["planned"]


def test_p30_same_graph_same_plans(runs: dict[str, dict[str, Any]]) -> None:
    """From one recorded graph both make the same frontier, life by life. Times that are measured anew may differ."""
    assert len(runs["one"]["plans"]) > 3 and runs["one"]["plans"] == runs["open"]["plans"]


def test_p35_kill_switch_gives_the_plain_run(runs: dict[str, dict[str, Any]]) -> None:
    """MEMOPT_DISABLE=1, set outside: the bits of a process that does not have the package; nothing is planned."""
    assert runs["off"]["state"] == runs["plain"]["state"]
    assert not runs["off"]["enabled"] and not runs["off"]["planned"] and runs["one"]["enabled"]


def test_p20_checkpoints_need_no_package(runs: dict[str, dict[str, Any]]) -> None:
    """Checkpoints of models and optimizers that were made in a run load where the package is not, and go on exactly."""
    resumed = runs["plain"]["resumed"]
    assert {"memopt", "open"} <= resumed.keys() and set(resumed.values()) == {runs["plain"]["state"]}


def test_m14_interpreter_exit_is_quiet(runs: dict[str, dict[str, Any]]) -> None:
    """No thread, no output, status 0, also where the interpreter ends while runs are open (`open`; `run` checks the rest)."""
    assert {found["threads"] for found in runs.values()} == {1}


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "2.99.0", "3.0.0a0+git1234", "unknown"])
def test_p33_untested_versions_run_plainly(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the tested range nothing is patched, not even the model's call; one warning a process; the plain bits."""
    model = small()
    train(model, sgd(model), batches(3))
    expected = state(model)
    versions._tested.cache_clear()
    monkeypatch.setattr(torch, "__version__", version)
    before = installed()
    with pytest.warns(UserWarning, match="outside of the versions") as warned:
        for _ in range(2):
            model = small()
            attributes = set(vars(model))
            with optimize(model, o := sgd(model), budget="min", verbose=False, profile_steps=1) as attached:
                assert installed() == before and set(vars(model)) == attributes
                train(model, o, batches(3))
                assert attached.plan is None and "untested torch" in attached.report()
            assert_same(expected, state(model))
    ours = [str(w.message) for w in warned if "MemOpt" in str(w.message)]
    assert len(ours) == 1 and version in ours[0] and "Install" in ours[0]
    monkeypatch.undo()
    versions._tested.cache_clear()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.2", "2.15.0a0+gitabc", torch.__version__])
def test_p33_tested_versions_are_patched(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions._tested.__wrapped__(version)
