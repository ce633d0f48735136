"""`memopt demo`, in a process of its own as users run it: within its budgets, as predicted, the losses of the plain run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


def test_a_quick_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_memopt.cli", "demo", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "summary.json").read_text())["workloads"]
    assert [o["name"] for o in outcomes] == ["digits", "chargpt"]
    for outcome in outcomes:
        assert outcome["measured_peak_bytes"] <= outcome["budget_bytes"] < outcome["unmodified_peak_bytes"]
        assert outcome["losses_identical"]


@pytest.mark.parametrize("name", ["plain_loop", "lightning_trainer", "batch_size", "offload_disk", "plan_offline"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """Each short example ends by itself; its output files go where it was started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert name != "plain_loop" or "identical to the plain run's: True" in done.stdout


def test_a_wheel_has_the_examples() -> None:
    """`memopt demo` imports them from the package there: setup.py puts the folder into it."""
    assert '"lightning_memopt.examples": "examples"' in (ROOT / "setup.py").read_text()
    assert not (ROOT / "lightning_memopt" / "examples").exists()
