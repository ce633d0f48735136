"""Unchanged scripts in the style of Accelerate's examples: the same end within a plan, in one process and in two."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

pytest.importorskip("accelerate")

from lightning_memopt.integrations import accelerate as front
from tests.cpu.lib.accelerate_scripts import EARLY, NAMES, TOGETHER, both
from tests.cpu.lib.launched import OURS, ROOT, SCRIPTS, forked, port, ran, same
from tests.cpu.lib.scripts import Interpreter

STEADY = ("cv_example", "gradient_accumulation", "checkpointing", "early_stopping", "multi_process_metrics", "local_sgd")
"""Scripts that hold no more in later steps than when the plan was made. Others hold the last batch of an evaluation while they
train on, which the budget of the smallest plan does not count."""

BATCH_NBYTES = 8 * 24 * 32 * 4
"""Of a batch. Garbage of the script before may hold one while the plan is made; Python collects it when it likes."""

LATE_NBYTES = 8192
"""Of the gradients and buffers of these models. A worker thread of gloo lets go of the tensors of its last collective when it
gets the processor: on a busy machine that is milliseconds after the collective has ended, in the next step."""


def ends(folder: Path, name: str, rank: int = 0) -> list[object]:
    return [torch.load(folder / f"{name}.{how}.{rank}", weights_only=True) for how in ("plain", "planned")]


@pytest.mark.parametrize("name", NAMES)
def test_one_process(name: str, tmp_path: Path) -> None:
    front._install()
    runs, printed = both(name, tmp_path, "--mixed_precision", "bf16" if name in ("cv_example", "checkpointing") else "no")
    assert same(*ends(tmp_path, name))
    assert any(run.plan is not None and run.plan.predicted.rebuilt_ops > 0 for run in runs)
    assert printed.count("measured peak") == len([run for run in runs if run.plan is not None])


@pytest.mark.long
@pytest.mark.skipif(not distributed.is_gloo_available(), reason="no gloo")
def test_two_processes(tmp_path: Path, interpreter: Interpreter) -> None:
    """The same scripts in two processes under our launcher and its configuration file, with gloo between them: both ranks end
    as under plain DDP, and each keeps its budget, as predicted.
    """
    ddp = ("--config_file", str(ROOT / "configs" / "accelerate_multi.yaml"), *port())
    command = [*OURS, *ddp, "--memopt_budget", "1GiB", "-m", "tests.cpu.lib.accelerate_scripts", str(tmp_path)]
    done = ran(*command, timeout=580, ACCELERATE_USE_CPU="true", **forked(interpreter))
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in TOGETHER:
            plain, planned = ends(tmp_path, name, rank)
            assert same(plain, planned), (name, rank)
            assert max(facts[name]["plans"]) > 0, (name, facts[name])
            assert (facts[name]["tables"] > 0) == (rank == 0)
            assert name not in EARLY or min(facts[name]["early"]) > 0, "no parameter is updated in backward"
            peaks = [peak for peak in facts[name]["peaks"] if peak is not None]
            assert peaks
            for measured, predicted, budget in peaks if name in STEADY else ():
                assert measured <= budget + LATE_NBYTES, (name, rank, peaks)
                assert measured == pytest.approx(predicted, rel=0.01, abs=BATCH_NBYTES), (name, rank, peaks)


@pytest.mark.long
@pytest.mark.skipif(not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo")
def test_n6_a_launched_script_whose_rank_is_killed(tmp_path: Path, interpreter: Interpreter) -> None:
    """The launcher ends the other rank at once, and names the one that was killed; no process and no file is left."""
    (tmp_path / "temporary").mkdir()
    ddp = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", *port())
    command = [*OURS, *ddp, "--memopt_budget", "1GiB", str(SCRIPTS / "interrupted.py"), str(tmp_path)]
    environment = forked(interpreter) | {"ACCELERATE_USE_CPU": "true", "TMPDIR": str(tmp_path / "temporary")}
    done = ran(*command, timeout=300, **environment)
    assert done.returncode != 0 and "rank      : 1" in done.stderr and "SIGKILL" in done.stderr, done.stderr[-4000:]
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    names = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in names if not name.startswith(("torchelastic_", "torchinductor_"))], "these are torch's own"
