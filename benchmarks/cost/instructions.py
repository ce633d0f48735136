"""How many instructions an op of a forward and of its backward takes, and in which library: by valgrind, the same on every run.

It is what `python -m benchmarks overhead --profile` prints. Valgrind must be installed. Each row is a process of its own under
callgrind, which counts only while the forwards, or the backwards, of `STEPS` steps run. What makes and frees the graph of
autograd is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.paths import ROOT
from benchmarks.lib.tiny_ops import LINKS, TinyOps

STEPS = 10
NAMES = ("eager", "native engine, nothing dropped", "native engine, all dropped")
PARTS = ("forward", "backward")
OWNERS = {"engine.so": "engine", "libtorch": "torch", "libc10": "torch", "python": "Python", "": "system"}
"""A part of a library's name -> whose it is. The first that fits."""
_LINE = re.compile(r"^\s*([\d,]+) \(\s*[\d.]+%\)\s+(\S.*?)(?: \[(\S+)\])?$")


def measured() -> dict[str, dict[str, dict[str, float]]]:
    """name -> part of the step -> instructions of an op by owner, and all of them. Prints them.

    Raises SystemExit if valgrind is not there.
    """
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions are counted by valgrind, which is not installed: install it (its package has this name)")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    owners = list(dict.fromkeys(OWNERS.values()))
    print("| instructions of an op | all | " + " | ".join(owners) + " |")
    print("|---|---|" + "---|" * len(owners))
    for name in NAMES:
        figures[name] = {part: _counted(name, part) for part in PARTS}
        for part, counts in figures[name].items():
            cells = [f"{counts.get(owner, 0):,.0f}" for owner in ("all", *owners)]
            print(f"| {name}: {part} | " + " | ".join(cells) + " |", flush=True)
    return figures


def _counted(name: str, part: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "callgrind.out"
        counting = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={file}"]
        command = [*counting, sys.executable, "-m", "benchmarks.cost.instructions", name, part]
        environment = os.environ | {"PYTHONHASHSEED": "0", "MEMOPT_NATIVE": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        listing = ["callgrind_annotate", "--threshold=100", "--auto=no", str(file)]
        lines = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    return by_owner(lines, STEPS * 4 * LINKS)


def by_owner(lines: list[str], ops: int) -> dict[str, float]:
    """Owner -> instructions of an op, of the functions that `callgrind_annotate` lists; `all`: of all of them."""
    counts: Counter[str] = Counter()
    library = ""
    for line in lines:
        match = _LINE.match(line)
        if match is None or "PROGRAM TOTALS" in line:
            continue
        number, function, named = match.groups()
        library = named or function
        counts[next(owner for key, owner in OWNERS.items() if key in library.lower())] += int(number.replace(",", ""))
    return {"all": counts.total() / ops} | {owner: count / ops for owner, count in counts.items()}


@contextlib.contextmanager
def _counting(on: bool) -> Iterator[None]:
    """Whether callgrind counts within the block."""
    if on:
        _control("on")
    yield
    if on:
        _control("off")


def _control(state: str) -> None:
    subprocess.run(["callgrind_control", "-i", state, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def _run(name: str, part: str) -> None:
    """The steps of one row, in a process that valgrind runs."""
    tiny = TinyOps()
    for _ in range(3):
        tiny.forward(name).sum().backward()
    gc.collect()
    gc.disable()
    for _ in range(STEPS):
        with _counting(part == "forward"):
            loss = tiny.forward(name).sum()
        with _counting(part == "backward"):
            loss.backward()


if __name__ == "__main__":
    _run(*sys.argv[1:])
