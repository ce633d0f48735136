"""What a run's solve takes, in this checkout and in another one: paired, for the 42 cases of `unchanged`.

    python -m benchmarks solve_times --base ../base [MODEL ...]     # ../base: a clone of this repository at another commit

One process of each checkout records the steps of a case, on times of ops that are known beforehand, and stops where its run
would solve. From there it is asked to solve by turns, each time in a forked child, which starts as the run would have: nothing
is computed already. Solvers look at a clock that counts the looks, so both go as far on any machine, however busy it is. CPU
seconds have those of all threads. A ratio is the median of those of the pairs. A row also says whether both made the same plan.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
_LEAST_SECONDS = 0.2
"""Shorter solves are repeated until a turn of them takes this long."""
_ENTRIES = "plan_for", "solved"
"""What a session calls to solve; the second name is an older one."""


def forked(solve: Callable[[], Any]) -> tuple[float, float, str]:
    """CPU seconds and wall seconds of one solve in a child, and a hash of its plan."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        wall, cpu = time.perf_counter(), time.process_time()
        plan = solve().plan
        took = time.process_time() - cpu, time.perf_counter() - wall
        said = *took, hashlib.sha256(repr((plan.lives, plan.predicted.peak_nbytes)).encode()).hexdigest()[:16]
        os.write(sink, json.dumps(said).encode())
        os._exit(0)
    os.close(sink)
    with open(source) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said))


def worker(name: str) -> None:
    """Runs the cases of a model, and stops at each first solve: a number on stdin asks for so many solves, 0 to go on."""
    import torch

    from lightning_memopt.session import times

    try:
        from lightning_memopt.session.solve import solving
    except ImportError:
        from lightning_memopt.session import solving
    from benchmarks.robustness import unchanged
    from tests.cpu.lib.times import Known

    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    times.current = Known()
    entry = next(each for each in _ENTRIES if hasattr(solving, each))
    original = getattr(solving, entry)

    def stopping(*args: Any) -> Any:
        setattr(solving, entry, original)
        while count := int(sys.stdin.readline()):
            found = [forked(lambda: original(*args)) for _ in range(count)]
            print(json.dumps(found), file=answers, flush=True)
        return original(*args)

    share = 0
    for model, what, options in unchanged.cases():
        if model == name:
            setattr(solving, entry, stopping)
            _, wanted = unchanged.ran(name, share if what == "share" else None, options)
            share = wanted if what == "smallest" else share


def asked(process: subprocess.Popen[str], count: int) -> list[tuple[float, float, str]]:
    assert process.stdin and process.stdout
    print(count, file=process.stdin, flush=True)
    return [tuple(each) for each in json.loads(process.stdout.readline())] if count else []


def compared(processes: list[subprocess.Popen[str]], pairs: int) -> str:
    """The cells of one case. `processes`: that of the base, and that of this checkout."""
    first = [asked(process, 1)[0] for process in processes]
    count = max(1, int(_LEAST_SECONDS / first[0][0]))
    turns = []
    for turn in range(pairs):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        took = {i: asked(processes[i], count) for i in order}
        turns.append([[sum(solve[kind] for solve in took[i]) / count for kind in (0, 1)] for i in (0, 1)])
    for process in processes:
        asked(process, 0)
    base, ours = (median(turn[i][0] for turn in turns) for i in (0, 1))
    cpu, wall = (median(turn[1][kind] / turn[0][kind] for turn in turns) for kind in (0, 1))
    return f"{base:.2f} | {ours:.2f} | x{cpu:.2f} | x{wall:.2f} | {'equal' if first[0][2] == first[1][2] else 'differs'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--base", type=Path, help="a checkout of the other commit")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return 0
    if args.base is None:
        parser.error("--base is needed")
    from benchmarks.models.registry import MODELS
    from benchmarks.robustness.unchanged import cases

    print("| case | base, CPU seconds | now | CPU time | wall time | plan |\n|---|---|---|---|---|---|", flush=True)
    for name in args.models or MODELS:
        command = [sys.executable, __file__, "--worker", name]
        processes = [
            subprocess.Popen(
                command, cwd=path, env=os.environ | {"PYTHONPATH": str(path.resolve())}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for path in (args.base, ROOT)
        ]  # fmt: skip
        for model, what, _ in cases():
            if model == name:
                print(f"| {name}, {what} | {compared(processes, args.pairs)} |", flush=True)
        for process in processes:
            process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
