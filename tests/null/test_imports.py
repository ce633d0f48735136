"""What an import brings: `import lightning_memopt` and the help of `memopt` need no library beyond Python's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cost import imports as benchmark

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "ortools", "rich", "lightning", "pytorch_lightning", "accelerate", "transformers", "matplotlib"}

COMMANDS = {
    "the package": "import lightning_memopt",
    "its errors": "from lightning_memopt import InfeasibleError, MemOptError",
    "a plan": "from lightning_memopt import Plan",
    "the command line": "import lightning_memopt.cli",
    "a parser": "import lightning_memopt.cli; lightning_memopt.cli.parser().format_help()",
}


def brought(code: str) -> set[str]:
    """The packages outside of Python's own that are loaded when `code` has run in a new process, but not before it."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    return packages - set(sys.stdlib_module_names) - {"lightning_memopt"}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_import_brings_no_other_library(name: str) -> None:
    assert brought(COMMANDS[name]) == set()


def test_the_check_sees_a_library() -> None:
    assert brought("import rich") & HEAVY == {"rich"}


def test_a_wrong_option_is_said_without_a_library() -> None:
    """`memopt` answers a wrong command line as fast as `--help`."""
    program = "import sys\nfrom lightning_memopt.cli import main\ntry: main(['plan'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "usage" in done.stderr and not {name.partition(".")[0] for name in done.stdout.split()} & HEAVY


def test_the_benchmark_names_the_slowest_modules() -> None:
    modules = dict(benchmark.slowest(("-c", "import lightning_memopt"), most=1000))
    assert {"lightning_memopt", "lightning_memopt._registration"} <= modules.keys()
    assert "torch" not in modules
