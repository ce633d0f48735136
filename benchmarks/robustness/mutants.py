"""Small changes of `plan` and `solvers`, one at a time: which of them does no test see? By mutmut, on a sample.

    pip install -e '.[mutants]'
    python -m benchmarks mutants --sample 250 --seed 17        # draws among all mutants of both packages
    python -m benchmarks mutants --only lightning_memopt.plan.rates.xǁMachineRatesǁknows__mutmut_5

mutmut makes every mutant (it negates a comparison, adds 1 to a number, leaves out an argument), and runs for each the tests
that reach its function; pyproject.toml says which tests there are ([tool.mutmut]). Mutants, and what became of them, are in the
folder `mutants/`. One that survives is printed with its change. `--only` judges mutants anew, after a test has changed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.lib.paths import ROOT

STATISTICS = ROOT / "mutants" / "mutmut-stats.json"
"""Which test reaches which function. mutmut asks new tests alone, and changed ones may reach others than before."""
BEGIN = "lightning_memopt.plan.forms.*"
"""Few mutants: to judge them makes all of the others."""
SEEN = ("killed", "timeout", "segfault", "suspicious")
"""A mutant that hangs, or ends the process, fails its tests."""


def mutmut(*words: str) -> str:
    """What `mutmut` prints. Raises SystemExit where it fails."""
    command = shutil.which("mutmut", path=str(Path(sys.executable).parent)) or shutil.which("mutmut")
    if command is None:
        raise SystemExit("mutmut is not installed: pip install -e '.[mutants]'")
    ended = subprocess.run([command, *words], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        said = [line.rpartition("\r")[2] for line in (ended.stdout + ended.stderr).splitlines()]  # without its progress
        raise SystemExit("\n".join([*said[-60:], f"mutmut {words[0]} failed"]))
    return ended.stdout


def states() -> dict[str, str]:
    """Name of a mutant -> what became of it."""
    lines = mutmut("results", "--all", "true").splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines if ": " in line)  # type: ignore[misc]


def drawn(sample: int, seed: int) -> list[str]:
    return sorted(random.Random(seed).sample(sorted(states()), sample))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=250, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--children", type=int, default=1, help="how many processes run tests")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="these mutants, and no sample")
    args = parser.parse_args()
    run = "run", "--max-children", str(args.children)
    STATISTICS.unlink(missing_ok=True)
    if not args.only:
        mutmut(*run, BEGIN)
    names = args.only or drawn(args.sample, args.seed)
    mutmut(*run, *names)
    became = {name: state for name, state in states().items() if name in names}
    missed = [name for name in names if became[name] not in SEEN]
    for name in missed:
        print(mutmut("show", name))
    print(", ".join(f"{n} {state}" for state, n in Counter(became.values()).most_common()))
    print(f"{len(names) - len(missed)} of {len(names)} seen: {(len(names) - len(missed)) / len(names):.1%}")


if __name__ == "__main__":
    main()
