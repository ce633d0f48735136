"""What tests/gpu and its benchmarks need of a machine, as far as it can be seen on one without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
HERE = ["torch", "numpy", "ortools", "rich", "pytest", "_pytest"]
"""Packages that are carried to the machine, or are there (docs/first_gpu_run.md)."""
BARE = """
import builtins, contextlib, sys, pytest
from _pytest.outcomes import Skipped

found = builtins.__import__
pytest.skip = lambda *_, **__: None  # as where there is a device

def imported(name, scope=None, *rest, **more):
    ours = (scope or {}).get("__name__", "").partition(".")[0] in ("benchmarks", "tests", "lightning_memopt")
    package = name.partition(".")[0]
    if ours and package in sys.stdlib_module_names | {*HERE, "benchmarks", "tests", "lightning_memopt"}:
        return found(name, scope, *rest, **more)
    if ours:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return found(name, scope, *rest, **more)

def importorskip(name, **options):
    raise Skipped(name, allow_module_level=True)

builtins.__import__, pytest.importorskip = imported, importorskip
import benchmarks.gpu.measure
"""


def run(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MEMOPT_CACHE"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_everything_is_imported_where_other_packages_are_missing() -> None:
    """A module may skip itself; none may fail."""
    assert len(TESTS) > 5
    imports = "".join(f"with contextlib.suppress(Skipped): import tests.gpu.{name}\n" for name in TESTS)
    run(f"HERE = {HERE}\n" + BARE + imports)


def test_no_plan_of_an_earlier_run_is_used() -> None:
    run("import os, tests.gpu.conftest; assert os.environ['MEMOPT_CACHE'] == '0'")


def test_nothing_of_the_pool_is_skipped_on_a_gpu_machine() -> None:
    """Headers that are missing there are an error with a remedy."""
    text = (ROOT / "tests" / "gpu" / "test_pool_cuda.py").read_text()
    assert text.count("pytest.skip") == 1, "where there is no device"
