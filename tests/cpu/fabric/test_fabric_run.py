"""`python -m lightning_memopt.fabric run`: Fabric's own command for an unchanged script, with our strategies and flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("lightning.fabric")
pytest.importorskip("click")

from tests.cpu.lib.launched import free_port
from tests.cpu.lib.scripts import Interpreter

SCRIPT = """
import sys, torch
from lightning.fabric import Fabric

fabric = Fabric()
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
for _ in range(6):
    fabric.backward(loss := model(torch.randn(128, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
strategy = fabric.strategy
planned = hasattr(strategy, "run") and strategy.run(model).status().plan.predicted.rebuilt_ops > 0
print("END", type(strategy).__name__, fabric.world_size, planned, sys.argv[1:], __name__, loss.item().hex())
"""


def ends(interpreter: Interpreter, tmp_path: Path, *command: str) -> list[str]:
    """The last words of the script, run by `python COMMAND`."""
    done = interpreter.run(*command, cwd=tmp_path, needs=("torch._dynamo", "lightning.fabric"))
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("END ")]
    return line.split()[1:]


@pytest.mark.long
def test_an_unchanged_script(tmp_path: Path, interpreter: Interpreter) -> None:
    """The script trains within the plan of the flags, with its own arguments, and ends with the plain loss."""
    Path(tmp_path, "train.py").write_text(SCRIPT)
    plain = ends(interpreter, tmp_path, "train.py", "--epochs")
    flags = ["--accelerator", "cpu", "--strategy", "memopt", "--main-port", str(free_port())]
    options = ["--memopt_budget", "min", "--memopt_profile_steps", "2", "--memopt_verbose", "false"]
    ours = ends(interpreter, tmp_path, "-m", "lightning_memopt.fabric", "run", *options, *flags, "train.py", "--epochs")
    assert plain[:3] == ["SingleDeviceStrategy", "1", "False"]
    assert ours[:3] == ["MemOptFabricStrategy", "1", "True"]
    assert ours[3:] == plain[3:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memopt_budget", "lots", "train.py"], "budget 'lots' is not a size"),
        (["--strategy", "memop", "train.py"], "'memopt', 'memopt_ddp'"),
        (["no_such.py"], "does not exist"),
    ],
    ids=["budget", "strategy", "script"],
)
def test_bad_arguments_start_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_memopt.fabric.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Path("train.py").write_text("raise AssertionError")
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
