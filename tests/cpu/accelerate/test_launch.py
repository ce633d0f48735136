"""Unchanged scripts under the launchers: the bits of `accelerate launch`, the budget kept, arguments and exit codes alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_memopt.units import parse_budget
from tests.cpu.lib.launched import OURS, ROOT, SCRIPTS, STOCK, forked, ran, same
from tests.cpu.lib.scripts import Interpreter

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def shown(table: str, row: str) -> int:
    """Bytes in a row of the table."""
    match = re.search(rf"│ {row} +│ ([\d.]+ \w+)", table)
    assert match is not None, table
    return parse_budget(match[1], 1 << 62)


@pytest.mark.long
def test_an_unchanged_script_keeps_its_budget_bit_by_bit(tmp_path: Path, interpreter: Interpreter) -> None:
    """The stock launcher, ours with flags, and ours as a module under the stock launcher end with the same bits."""
    script = str(SCRIPTS / "nlp_example.py")
    outputs = {name: str(tmp_path / name) for name in ("plain", "ours", "module")}
    forks = forked(interpreter)
    plain = ran(*STOCK, "--cpu", script, "--output", outputs["plain"], **forks)
    assert plain.returncode == 0 and "MemOpt" not in plain.stdout + plain.stderr, plain.stderr
    flags = ("--memopt_budget", "12MiB", "--memopt-profile-steps", "2")
    ours = ran(*OURS, "--cpu", *flags, script, "--output", outputs["ours"], **forks)
    launch = ("-m", "lightning_memopt.launch", "--budget", "12MiB")
    module = ran(*STOCK, "--cpu", *launch, script, "--output", outputs["module"], **forks)
    expected = torch.load(f"{outputs['plain']}.0")
    for name, done in (("ours", ours), ("module", module)):
        assert done.returncode == 0, done.stderr
        assert same(torch.load(f"{outputs[name]}.0"), expected)
        assert done.stderr.count("measured peak") == 1
        measured, predicted = (shown(done.stderr, row) for row in ("measured peak", "predicted peak"))
        assert measured <= parse_budget("12MiB", 1 << 62) < shown(done.stderr, "unmodified peak")
        assert abs(measured - predicted) <= 0.01 * predicted


FACTS = """
import json, os, pickle, sys
from dataclasses import dataclass

@dataclass
class Thing:
    x: int

pickle.loads(pickle.dumps(Thing(1)))
names = "__name__ __file__ __spec__ __package__ __doc__ __cached__".split()
facts = {name: str(globals().get(name)).partition(" loader=")[0] for name in names}
facts["argv"], facts["path"], facts["main"] = sys.argv, sys.path[0], vars(sys.modules["__main__"]) is globals()
facts["imported"] = [name for name in ("torch", "numpy", "accelerate") if name in sys.modules]
facts["annotations"] = Thing.__annotations__["x"] is int
print(json.dumps(facts))
end = sys.argv[1]
if end == "raise":
    raise KeyError("gone")
sys.exit(int(end) if end.isdigit() else end)
"""


@pytest.mark.parametrize("end", ["0", "7", "a message", "raise"])
def test_a_script_finds_its_process_as_python_runs_it(tmp_path: Path, end: str) -> None:
    """Arguments, `__main__`, `__file__`, `sys.path`, what is imported, the exit code and the last line of the error."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "facts.py").write_text(FACTS)
    arguments = [os.path.join("sub", "facts.py"), end, "--budget", "3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    plain = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    ours = ran("lightning_memopt.launch", "--budget", "1GiB", *arguments, cwd=tmp_path)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert ours.returncode == plain.returncode
    assert ("nothing was planned" in ours.stderr) == (end == "0"), "an error explains itself"
    assert end == "0" or ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    plain, ours = ran("facts", "3", cwd=tmp_path), ran("lightning_memopt.launch", "-m", "facts", "3", cwd=tmp_path)
    assert json.loads(ours.stdout) == json.loads(plain.stdout) and ours.returncode == plain.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--budget", "4G", "x.py"], "G is ambiguous"), (["absent.py"], "can't open file"), (["--budgt", "1", "x.py"], "--budgt")],
)
def test_the_module_refuses_before_the_script(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "x.py").write_text("print('ran')")
    done = ran("lightning_memopt.launch", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""


def test_torchrun_without_accelerate(tmp_path: Path, interpreter: Interpreter) -> None:
    """A script that never uses Accelerate trains as it does, and a line says so once."""
    (tmp_path / "x.py").write_text("import os; os.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())")  # at once: two write
    command = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lightning_memopt.launch", "x.py")
    done = ran(*command, cwd=tmp_path, **forked(interpreter))
    assert done.returncode == 0 and sorted(re.findall(r"rank \d", done.stdout)) == ["rank 0", "rank 1"], done.stderr
    assert done.stderr.count("nothing was planned") == 1
