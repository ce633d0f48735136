"""`memopt demo`, in a process of its own as users run it: within its budgets, as predicted, the losses of the plain run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")


def test_a_quick_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_memopt.cli", "demo", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "summary.json").read_text())["workloads"]
    assert [o["name"] for o in outcomes] == ["digits", "chargpt"]
    for outcome in outcomes:
        assert outcome["measured_peak_nbytes"] <= outcome["budget_nbytes"] < outcome["unmodified_peak_nbytes"]
        assert outcome["losses_identical"]
