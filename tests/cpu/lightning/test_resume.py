"""Save, be killed, resume: identical to the uninterrupted run, with and without the strategy on either side."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from lightning_memopt.session.judge.states import Running
from tests.cpu.lib import killed
from tests.cpu.lib.fits import Task, assert_same_tree, fit, memopt, outcome, session_of
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import assert_same, state
from tests.cpu.lib.scripts import Interpreter

KILLED_AT = 10
SAVED_AT = KILLED_AT - KILLED_AT % killed.EVERY


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> dict[str, Path]:
    """What two fits had saved when they were killed: a plain one and a planned one."""
    directories = {kind: tmp_path_factory.mktemp(kind) for kind in ("plain", "memopt")}
    for kind, directory in directories.items():
        program = ("-m", "tests.cpu.lib.killed", kind, str(directory), str(KILLED_AT))
        done = interpreter.run(*program, cwd=tmp_path_factory.getbasetemp(), needs=("torch._dynamo", "lightning.pytorch"))
        assert done.returncode == -signal.SIGKILL, done.stderr
    found = {kind: directory / f"step={SAVED_AT}.ckpt" for kind, directory in directories.items()}
    for directory in directories.values():
        assert len(list(directory.iterdir())) == KILLED_AT // killed.EVERY
    return found


@pytest.mark.long
def test_m9_p21_resumed_after_a_kill(checkpoints: dict[str, Path]) -> None:
    """Weights, optimizer, schedule, generator and every loss after the checkpoint are those of the uninterrupted plain run."""
    with torch.random.fork_rng():
        whole = killed.run("plain")
        expected = outcome(whole)
        losses = whole.lightning_module.losses  # type: ignore[union-attr]
        for kind in ("plain", "memopt", "uninterrupted"):
            for saved in checkpoints if kind != "uninterrupted" else [None]:
                trainer = killed.run(
                    "memopt" if kind == "uninterrupted" else kind, resume=None if saved is None else checkpoints[saved]
                )
                assert_same_tree(expected, outcome(trainer))
                seen = trainer.lightning_module.losses  # type: ignore[union-attr]
                first = 0 if saved is None else SAVED_AT
                assert seen == {step: loss for step, loss in losses.items() if step >= first}
                if kind != "plain":
                    planned = state_of(session_of(trainer))
                    assert isinstance(planned, Running) and planned.plan.predicted.rebuilt_ops > 0 and planned.peaks.steps


@pytest.mark.long
def test_checkpoints_of_both_are_the_same(checkpoints: dict[str, Path]) -> None:
    """Ours has one key more, primitives; both load with weights_only."""
    one, other = (torch.load(path, weights_only=True) for path in checkpoints.values())
    assert "lightning_memopt" not in one and other.pop("lightning_memopt")["predicted_peak_nbytes"] > 0
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "generator", "global_step"):
        assert_same_tree(one[key], other[key])
    killed.Resumable().load_state_dict(other["state_dict"], strict=True)


def test_m9_p20_resume_between_epochs(tmp_path: Path) -> None:
    """Checkpoints at the end of an epoch cross over in every direction: all resumed runs are the same."""
    paths = {}
    for name in ("plain", "memopt"):
        trainer = fit("auto" if name == "plain" else memopt(), max_epochs=1)
        paths[name] = tmp_path / f"{name}.ckpt"
        trainer.save_checkpoint(paths[name])
        Task().load_state_dict(torch.load(paths[name], weights_only=True)["state_dict"], strict=True)
    ends = [state(fit("auto" if second == "plain" else memopt(), resume=path).model) for path in paths.values() for second in paths]  # fmt: skip # noqa: E501
    for end in ends:
        assert_same(ends[0], end)
