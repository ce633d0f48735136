"""Ctrl-C after a plan was solved raises KeyboardInterrupt: CP-SAT left the handler that ends the process at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOLVES = {
    "a plan that parks": (
        "from benchmarks.robustness.leak import Steps\nfrom lightning_memopt import optimize\nsteps = Steps()\n"
        "with optimize(steps.model, steps.optimizer, budget='min', offload='disk', profile_steps=1, verbose=False):\n"
        "    steps.step()\n"
    ),
    "an order of ops": (
        "from lightning_memopt.solvers.ordering import excerpts\n"
        "from tests.solvers.test_ordering import random_problem\n"
        "assert excerpts.solved(random_problem(1, 8), range(8), 0, 8, 0, 5.0, 1).proven\n"
    ),
}


@pytest.mark.parametrize("what", SOLVES)
def test_ctrl_c_is_raised_after(what: str) -> None:
    program = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom ortools.sat.python import cp_model\n"
        "solved, solve = [], cp_model.CpSolver.solve\n"
        "cp_model.CpSolver.solve = lambda self, *args: (solved.append(1), solve(self, *args))[1]\n"
        f"{SOLVES[what]}assert solved\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('raised')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "raised\n"), ran.stderr
