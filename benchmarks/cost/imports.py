"""What an import costs: seconds of `import lightning_memopt` and `memopt --help` in a new process, beyond Python's own start.

    python -m benchmarks imports

Each command runs in new processes, in turn with a process that does nothing; the median of the paired differences. The
bytecode is there: the first round writes it and is not counted. The slowest modules are from `python -X importtime`:
microseconds of a module by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTHING = ("-c", "pass")
COMMANDS = {
    "import lightning_memopt": (("-c", "import lightning_memopt"), 0.1),
    "memopt --help": (("-c", "from lightning_memopt.cli import main; main(['--help'])"), 0.3),
    "memopt explain --help": (("-c", "from lightning_memopt.cli import main; main(['explain', '--help'])"), 0.3),
}
"""What is measured -> (arguments of Python, goal in seconds beyond an empty process)."""


def seconds(arguments: tuple[str, ...]) -> float:
    """Wall time of a new Python process with these arguments."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def slowest(arguments: tuple[str, ...], most: int = 5) -> list[tuple[str, int]]:
    """(module, microseconds by itself) of the imports that take longest."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "[us]" not in line]
    modules = [(name.strip(), int(own)) for own, _, name in lines]
    return sorted(modules, key=lambda module: -module[1])[:most]


def measured(arguments: tuple[str, ...], rounds: int) -> tuple[float, float]:
    """(seconds of an empty process, seconds beyond it), medians over the rounds after the first."""
    pairs = [(seconds(NOTHING), seconds(arguments)) for _ in range(rounds + 1)][1:]
    return statistics.median(empty for empty, _ in pairs), statistics.median(ours - empty for empty, ours in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    rows = []
    for name, (arguments, goal) in COMMANDS.items():
        empty, beyond = measured(arguments, rounds)
        row = {"command": name, "python_seconds": round(empty, 4), "seconds_beyond": round(beyond, 4), "goal_seconds": goal}
        rows.append({**row, "slowest_us": dict(slowest(arguments))})
    machine = {"python": platform.python_version(), "cpu": platform.processor() or platform.machine()}
    print(json.dumps({"machine": machine, "rounds": rounds, "commands": rows}, indent=1))


if __name__ == "__main__":
    main()
