"""`memopt demo`, in a process of its own as users run it: within its budgets, as predicted, the losses of the plain run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.cpu.lib.scripts import Interpreter
from tests.distributions import faults_of_wheel

ROOT = Path(__file__).parents[3]


NEEDS = "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api", "lightning.pytorch", "sklearn.datasets"


@pytest.mark.long
def test_a_quick_demo(tmp_path: Path, interpreter: Interpreter) -> None:
    command = ("-m", "lightning_memopt.cli", "demo", "--quick", "--folder", str(tmp_path))
    done = interpreter.run(*command, cwd=tmp_path, needs=NEEDS, seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "summary.json").read_text())["workloads"]
    assert [o["name"] for o in outcomes] == ["digits", "chargpt"]
    for outcome in outcomes:
        assert outcome["measured_peak_nbytes"] <= outcome["budget_nbytes"] < outcome["unmodified_peak_nbytes"]
        assert outcome["losses_identical"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
EXAMPLES: dict[str, list[str]] = {
    "plain_loop": ["-m", "examples.plain_loop"],
    "lightning_trainer": ["-m", "examples.lightning_trainer"],
    "lightning_cli": ["-m", "examples.lightning_cli", "fit", "--config", str(ROOT / "configs" / "lightning.yaml")],
    "fabric_loop": ["-m", "examples.fabric_loop"],
    "ddp_torchrun": [*TORCHRUN, str(ROOT / "examples" / "ddp_torchrun.py")],
    "fsdp2_torchrun": [*TORCHRUN, str(ROOT / "examples" / "fsdp2_torchrun.py")],
    "batch_size": ["-m", "examples.batch_size"],
    "offload_disk": ["-m", "examples.offload_disk"],
    "plan_offline": ["-m", "examples.plan_offline"],
}
"""Example -> the arguments of Python that run it."""
NOT_SHORT = {"__init__", "chargpt", "demo", "digits", "training"}
"""What `memopt demo` runs, and what the two trainings share."""
RUN_ELSEWHERE = {"accelerate_script", "transformers_trainer", "peft_lora"}
"""Examples that the rooms of their frameworks run."""
COMPARES = {"plain_loop", "ddp_torchrun", "fsdp2_torchrun"}
QUICK = {"plain_loop", "fabric_loop", "plan_offline"}


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | NOT_SHORT | RUN_ELSEWHERE


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES])
def test_an_example_runs(name: str, tmp_path: Path, interpreter: Interpreter) -> None:
    """Each short example ends by itself and prints the table; its output files go where it was started."""
    done = interpreter.run(*EXAMPLES[name], cwd=tmp_path, needs=NEEDS)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "measured peak" in printed and "unmodified peak" in printed
    assert name not in COMPARES or re.search("losses identical to .*: True", done.stdout)


def test_a_wheel_has_the_examples(tmp_path: Path, interpreter: Interpreter) -> None:
    """setup.py puts the folder into the package, and there `memopt demo` imports it; the wheel has all files, and no others."""
    pytest.importorskip("setuptools")
    for name in ("lightning_memopt", "examples"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "source", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert faults_of_wheel(wheel) == []
    with zipfile.ZipFile(wheel) as file:
        assert {name.split("/")[0] for name in file.namelist()} == {"lightning_memopt", "lightning_memopt-0.1.0.dist-info"}
        file.extractall(tmp_path / "installed")
    where = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})"
    where += "; from lightning_memopt.cli import _example; print(_example('demo').__name__)"
    done = interpreter.run("-c", where, cwd=tmp_path, needs=NEEDS)
    assert done.stdout == "lightning_memopt.examples.demo\n", done.stderr
