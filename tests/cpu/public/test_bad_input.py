"""`memopt` and bad input: one line that says what and what to do, exit code 2, nothing half-written, no device replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from lightning_memopt import files
from lightning_memopt.cli import main
from lightning_memopt.errors import PlanFileError
from lightning_memopt.plan import read_plan, write_plan

HERE = "tests.cpu.public.test_bad_input"


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    names = ("[/INST]", "head[cls]", "a:b:c")
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh()) for name in names})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Odd(nn.Module):
    """Blocks whose names a terminal could take for markup."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, _ = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def odd() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = Odd()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4096, 8)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def two() -> Any:
    return odd()[:2]


def without_optimizer() -> Any:
    model, _, step = odd()
    return model, None, step


def raises() -> NoReturn:
    raise RuntimeError("no data here")


def leaves() -> NoReturn:
    sys.exit(3)


def raising_step() -> Any:
    return *_model(), raises


def no_update() -> Any:
    model, optimizer, _ = odd()
    return model, optimizer, lambda: model(torch.ones(4096, 8)).sum().backward()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "odd.json"
    assert main(["plan", f"{HERE}:odd", "--budget", "min", "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    "spec, said",
    [
        (":", "neither a file nor package.module:function"),
        (f"{HERE}:", "neither a file nor package.module:function"),
        (":odd", "neither a file nor package.module:function"),
        (".test_bad_input:odd", "neither a file nor package.module:function"),
        ("no_such_module:odd", "importing no_such_module raised ModuleNotFoundError"),
        (f"{HERE}:nothing", "has no function nothing"),
        (f"{HERE}:HERE", "has str, not a function"),
        (f"{HERE}:two", "returned (Odd, SGD); make it return (model, optimizer, step)"),
        (f"{HERE}:without_optimizer", "returned (Odd, NoneType, function)"),
        (f"{HERE}:raises", "raised RuntimeError: no data here"),
        (f"{HERE}:leaves", "raised SystemExit: 3"),
        (f"{HERE}:raising_step", "the step of "),
        (f"{HERE}:no_update", "step() must run a forward of the model in training, its backward, and optimizer.step()"),
    ],
)
def test_what_the_users_function_does_wrong_is_one_line(
    spec: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", spec, "--budget", "min", "-o", str(tmp_path / "plan.json")]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "raised" not in message or "no_such_module" in message or f"{Path(__file__).name}, line " in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, said",
    [
        (["--budget", "80%"], "80% is a share of a device. Give bytes: 1048576, 11GiB, or say how large the device is"),
        (["--budget", "0.5"], "is a share of a device"),
        (["--budget", "auto"], "is a share of a device"),
        (["--budget", "abc"], "--budget is 'abc'. Give bytes"),
        (["--budget", "9999999TiB"], "less than 4 EiB"),
        (["--budget", "80%", "--device-nbytes", "0"], "--device-nbytes is '0'"),
        (["--budget", "min", "--offload", "nowhere"], "offload is 'nowhere'"),
        (["--budget", "min", "-o", "/dev/null"], "not a regular file"),
        (["--budget", "min", "-o", "not here/p.txt"], "there is no folder not here"),
    ],
)
def test_options_are_looked_at_before_anything_is_solved(
    words: list[str], said: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = plan.read_bytes()
    assert main(["plan", str(plan), *(word.format(plan=plan) for word in words)]) == 2
    out = capsys.readouterr()
    assert said in out.err
    assert out.err.count("\n") == 1, "nothing was solved"
    assert plan.read_bytes() == before


def test_without_o_the_source_is_never_overwritten(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_bytes(plan.read_bytes())
    assert main(["plan", "plan.json", "--budget", "1GiB"]) == 2
    assert "is the plan file to plan again" in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_bytes() == plan.read_bytes()
    assert main(["plan", str(plan), "--budget", "1GiB", "-o", "plan.json"]) == 0


def test_a_share_of_a_device_that_is_known(plan: Path, tmp_path: Path) -> None:
    assert main(["plan", str(plan), "--budget", "50%", "--device-nbytes", "16GiB", "-o", str(tmp_path / "half.json")]) == 0
    assert read_plan(tmp_path / "half.json")[0].budget_nbytes == 8 << 30
    assert main(["plan", str(plan), "--budget", " MIN ", "-o", str(tmp_path / "least.json")]) == 0


@pytest.mark.parametrize("target", ["pipe", "link to a pipe"])
def test_what_is_no_file_is_never_replaced(target: str, plan: Path, tmp_path: Path) -> None:
    """A file that is renamed over /dev/null takes it from all processes of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if target != "pipe":
        path = tmp_path / "link"
        path.symlink_to(pipe)
    with pytest.raises(PlanFileError, match="it exists and is not a regular file"):
        write_plan(path, *read_plan(plan))
    with pytest.raises(OSError, match="not a regular file"):
        files.replace_file(path, b"")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "words",
    [
        ["report", "{plan}", "-o", "page.json"],
        ["report", "{plan}", "-o", "noext"],
        ["breakdown", "{plan}", "--png", "peak.xyz"],
        ["explain", "{plan}", "--seconds", "nan"],
        ["plan", "{plan}", "--budget", "min", "--solver-seconds", "-1"],
    ],
)
def test_arguments_of_the_wrong_kind_are_usage(words: list[str], plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([word.format(plan=plan) for word in words])
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "{plan}", "-o", "{long}.html"], ["breakdown", "{plan}", "--png", "{folder}.png"]])
def test_paths_that_cannot_be_written(words: list[str], plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.png").mkdir()
    values = {"plan": plan, "long": tmp_path / ("x" * 300), "folder": tmp_path / "folder"}
    assert main([word.format(**values) for word in words]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_names_are_no_markup(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(plan), "--seconds", "0"]) == main(["explain", str(plan), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("[/INST]", "head[cls]", "a:b:c"))
    assert main(["breakdown", str(plan)]) == 0
    assert main(["explain", str(plan), "--op", "SIGMOID"]) == 0


def test_no_smallest_plan_is_claimed_when_the_time_was_over(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smallest, _ = read_plan(plan)
    words = ["plan", str(plan), "--budget", str(smallest.unmodified_peak_nbytes - 1), "-o", str(plan.with_name("none.json"))]
    assert main([*words, "--solver-seconds", "0"]) == 0, "the search for a plan that keeps the budget goes on"
    capsys.readouterr()
    assert main(["explain", str(plan), "--seconds", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert "because time ran out" in out
    assert "the smallest budget is" not in out


def test_outputs_that_cannot_take_a_table(plan: Path) -> None:
    """Closed, full, and ASCII."""
    command = f"{sys.executable} -m lightning_memopt.cli explain {plan} --seconds 0"
    for more, code in ((">&-", 0), ("> /dev/full", 2), ("| cat", 0)):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; PYTHONIOENCODING=ascii {command} {more}"], capture_output=True, text=True
        )
        assert done.returncode == code, (more, done.stderr)
        assert "Traceback" not in done.stderr
