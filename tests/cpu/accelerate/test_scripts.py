"""Unchanged scripts in the style of Accelerate's examples: the same end within a plan, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed

pytest.importorskip("accelerate")

from lightning_memopt.integrations import accelerate as front
from tests.cpu.lib.accelerate_scripts import NAMES, TOGETHER, both
from tests.cpu.lib.launched import OURS, port, ran, same


def ends(folder: Path, name: str, rank: int = 0) -> list[object]:
    return [torch.load(folder / f"{name}.{how}.{rank}", weights_only=True) for how in ("plain", "planned")]


@pytest.mark.parametrize("name", NAMES)
def test_one_process(name: str, tmp_path: Path) -> None:
    front._install()
    runs, printed = both(name, tmp_path, "--mixed_precision", "bf16" if name in ("cv_example", "checkpointing") else "no")
    assert same(*ends(tmp_path, name))
    assert any(run.plan is not None and run.plan.predicted.rebuilt_ops > 0 for run in runs)
    assert printed.count("measured peak") == len([run for run in runs if run.plan is not None])


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="no gloo")
def test_two_processes(tmp_path: Path) -> None:
    """The same scripts in two processes under our launcher, with gloo between them: both ranks end as under plain DDP."""
    ddp = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", *port())
    command = [*OURS, *ddp, "--memopt_budget", "1GiB", "-m", "tests.cpu.lib.accelerate_scripts", str(tmp_path)]
    done = ran(*command, timeout=580, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in TOGETHER:
            plain, planned = ends(tmp_path, name, rank)
            assert same(plain, planned), (name, rank)
            assert max(facts[name]["plans"]) > 0, (name, facts[name])
            assert (facts[name]["tables"] > 0) == (rank == 0)
