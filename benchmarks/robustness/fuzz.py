"""Random programs under random plans, and random loops within random budgets: equal to the plain run, to the bit?

    python -m benchmarks fuzz [program] [loop] --minutes 10 --seed 0
    python -m benchmarks fuzz --case finding.json

Each seed is two cases. A program (fuzzing/case.py): a model of random ops, a random plan that rebuilds and puts tensors on a
disk, steps with other branches, sizes, writes, copies, errors, second backwards, updates in backward. A loop (fuzzing/loop.py):
such a model trained as loops train, observed, planned and metered as for a user. It is exact, within its budget by an
allocator count that is not part of this package, in observed steps near the plain step, refused at most once, and never silent.
Cases run in processes of their own, so that a crash or a hang is a finding too. What fails is made as small as possible, and
printed as JSON. The last lines count what was drawn. The exit code is the number of findings, at most 100.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lib.paths import ROOT
from benchmarks.robustness import loops_count
from benchmarks.robustness.fuzzing.case import Case, draw
from benchmarks.robustness.fuzzing.loop import Loop, draw_loop, read
from benchmarks.robustness.fuzzing.runs import Finding
from benchmarks.robustness.fuzzing.shrink import shrunk
from lightning_memopt.runtime import install_native

LIMIT_SECONDS = 120.0
"""A case that takes longer hangs."""
DRAWS: dict[str, Callable[[int], Case | Loop]] = {"program": draw, "loop": draw_loop}


class Worker:
    """A process that judges cases of one kind, begun again after a crash. It leads a group of those that it starts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def judge(self, case: Case | Loop) -> Finding | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.robustness.fuzzing.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=loops_count.environment(),
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(case.to_json() + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], LIMIT_SECONDS)
            answer = process.stdout.readline() if ready else None
        except BrokenPipeError:
            answer, ready = "", [process.stdout]
        if answer:
            kind, text = json.loads(answer)
            return Finding(kind, text) if kind else None
        self.close()
        if not ready:
            return Finding("hang", f"no answer in {LIMIT_SECONDS:g} s")
        return Finding("crash", f"exit code {process.returncode}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def smallest(worker: Worker, case: Case | Loop, finding: Finding, seconds: float) -> Case | Loop:
    """The case, made as small as possible within the given seconds."""
    ends = time.monotonic() + seconds

    def fails(smaller: Case | Loop) -> bool:
        again = worker.judge(smaller)
        return again is not None and again.kind == finding.kind

    return shrunk(case, fails, lambda: time.monotonic() > ends)


Found = tuple[int, Finding, Case | Loop]


def fuzz(minutes: float, seed: int, kinds: Sequence[str], say: Callable[[str], None] = print, only: str = "") -> list[Found]:
    """Cases of these kinds from `seed` on until the time is over; what is wrong with any of them, with the smallest case that
    shows it. `only`: those that have this ("": all).
    """
    ends, count = time.monotonic() + 60 * minutes, 0
    workers = {kind: Worker() for kind in kinds}
    drawn = {kind: Counter[str]() for kind in kinds}
    findings: list[Found] = []
    install_native(say)  # to build it takes longer than a case may
    loops_count.built()
    try:
        while time.monotonic() < ends:
            for kind, worker in workers.items():
                case = DRAWS[kind](seed + count)
                if only and only not in case.drawn:
                    continue
                drawn[kind].update(case.drawn)
                finding = worker.judge(case)
                if finding is not None:
                    small = smallest(worker, case, finding, 120.0)
                    final = worker.judge(small) or finding
                    findings.append((case.seed, final, small))
                    say(f"seed {case.seed}: {final.kind}: {final.text}\n  {small.to_json()}")
            count += 1
    finally:
        for worker in workers.values():
            worker.close()
    for kind, counts in drawn.items():
        say(f"{kind}s: " + ", ".join(f"{name} {times}" for name, times in counts.most_common()))
    found = Counter(finding.kind for _, finding, _ in findings)
    say(f"{count} seeds from {seed} on, each a {' and a '.join(kinds)}: {len(findings)} findings {dict(found)}")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{' or '.join(DRAWS)}; both where none is given")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="WHAT", help="what all cases have: a feature of loops, or an op")
    parser.add_argument("--case", type=Path, help="a file with a case as JSON, to be judged alone")
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in DRAWS]:
        parser.error(f"no such kind: {', '.join(unknown)}")
    if options.case is None:
        return min(100, len(fuzz(options.minutes, options.seed, options.kinds or list(DRAWS), only=options.only)))
    worker = Worker()
    try:
        finding = worker.judge(read(options.case.read_text()))
    finally:
        worker.close()
    print("as it should be" if finding is None else f"{finding.kind}: {finding.text}")
    return int(finding is not None)


if __name__ == "__main__":
    sys.exit(main())
