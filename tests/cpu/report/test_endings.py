"""The page says what ended the run, also in fronts whose loop is the user's own, and nothing of errors that did not end it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from tests.cpu.lib.endings import FRONTS, OPTIONS, WAYS
from tests.cpu.lib.pages import Blocks, page_at
from tests.cpu.lib.scripts import Interpreter

pytestmark = pytest.mark.long

IN_PROCESS = {
    "closes": "ValueError: of the loop",
    "handles_another": "",
    "recovers": "",
    "collected": "",
    "exits": "",
}
"""Way of tests/cpu/lib/endings.py -> what the page says ended the run."""


def ended_by(path: Path) -> str:
    """What ended the run, as its page says; "" where it ended well. The run had a plan."""
    page = page_at(path)
    assert sum(row[1][0] == "planned" for row in page.rows("steps-all")) >= 3
    _, found, rest = page.text.partition("The run was ended by ")
    return rest if found else ""


@pytest.mark.parametrize(
    ("front", "way"),  # runs of Accelerate do not end with their model
    [(front, way) for front in FRONTS for way in IN_PROCESS if (front, way) != ("accelerate", "collected")],
)
def test_the_loop_is_the_users_own(front: str, way: str, tmp_path: Path) -> None:
    pytest.importorskip({"fabric": "lightning"}.get(front, front))
    with contextlib.suppress(SystemExit):
        WAYS[way](lambda: FRONTS[front](str(tmp_path / "run.html")))
    error = IN_PROCESS[way]
    said = ended_by(tmp_path / "run.html")
    assert said.startswith(error) and bool(said) == bool(error)


@pytest.mark.skipif(sys.platform == "win32", reason="signals and forks")
@pytest.mark.parametrize(
    ("front", "way", "error"),
    [
        ("fabric", "raises", "ValueError: of the loop"),
        ("accelerate", "interrupted", "KeyboardInterrupt"),
        ("fabric", "in_a_process", "ValueError: of the loop"),
        ("accelerate", "in_a_process", "ValueError: of the loop"),
    ],
)
def test_what_ends_the_process_ended_the_run(
    front: str, way: str, error: str, tmp_path: Path, interpreter: Interpreter
) -> None:
    package = {"fabric": "lightning"}.get(front, front)
    pytest.importorskip(package)
    program = ("-m", "tests.cpu.lib.endings", front, way, str(tmp_path / "run.html"))
    done = interpreter.run(*program, cwd=tmp_path, needs=(package,))
    assert done.returncode != 0 and error in done.stderr, done.stderr[-3000:]
    assert ended_by(tmp_path / "run.html").startswith(error)


def test_ctrl_c_in_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import TrainerCallback

    from tests.cpu.lib.trainers import callback, trainer

    class Interrupts(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer([callback(report=tmp_path / "run.html"), Interrupts()]).train()
    assert "The run was ended by KeyboardInterrupt" in page_at(tmp_path / "run.html").text
    trainer([callback(report=tmp_path / "run.html")]).train()
    assert "The run was ended by" not in page_at(tmp_path / "run.html").text


@pytest.mark.parametrize("code", [None, 0, 3])
def test_an_exit_is_an_error_only_with_a_code(tmp_path: Path, code: int | None) -> None:
    model = Blocks()
    with pytest.raises(SystemExit):
        with optimize(model, torch.optim.Adam(model.parameters()), report=tmp_path / "run.html", **OPTIONS):
            raise SystemExit(code)
    assert ("The run was ended by SystemExit: 3" in page_at(tmp_path / "run.html").text) == (code == 3)


def test_an_error_that_nobody_caught_before_the_run_is_not_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interactive Python keeps the last error that nobody caught, until the next one."""
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    model = nn.Sequential(nn.Linear(4, 4))
    with optimize(model, torch.optim.Adam(model.parameters()), report=tmp_path / "run.html", **OPTIONS):
        model(torch.randn(2, 4)).sum().backward()
    assert "The run was ended by" not in page_at(tmp_path / "run.html").text
