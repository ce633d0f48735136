"""Random programs under random plans, in steps that depart from the observed ones: equal to the plain run, to the bit?

    python -m benchmarks fuzz --minutes 10 --seed 0
    python -m benchmarks fuzz --case finding.json

Each seed is a case (fuzzing/case.py): a model of random ops, a random plan that rebuilds and puts tensors on a disk,
steps with other branches, sizes, writes, copies, errors, second backwards, updates in backward. Cases run in a process of
their own, so that a crash or a hang is a finding too. What fails is made as small as possible, and printed as JSON. The exit
code is the number of findings, at most 100.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.lib.paths import ROOT
from benchmarks.robustness.fuzzing.case import Case, draw
from benchmarks.robustness.fuzzing.runs import Finding
from benchmarks.robustness.fuzzing.shrink import shrunk
from lightning_memopt.runtime import install_native

LIMIT_SECONDS = 60.0
"""A case that takes longer hangs."""


class Worker:
    """A process that judges cases, begun again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def judge(self, case: Case) -> Finding | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.robustness.fuzzing.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
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
            process.kill()
            process.wait()


def smallest(worker: Worker, case: Case, finding: Finding, seconds: float) -> Case:
    """The case made as small as possible in so many seconds."""
    ends = time.monotonic() + seconds

    def fails(smaller: Case) -> bool:
        again = worker.judge(smaller)
        return again is not None and again.kind == finding.kind

    return shrunk(case, fails, lambda: time.monotonic() > ends)


def fuzz(minutes: float, seed: int, say: Callable[[str], None] = print) -> list[tuple[int, Finding, Case]]:
    """Cases from `seed` on until the time is over; what is wrong with any of them, with the smallest case that shows it."""
    worker, ends, count = Worker(), time.monotonic() + 60 * minutes, 0
    findings = []
    install_native(say)  # to build it takes longer than a case may
    try:
        while time.monotonic() < ends:
            case = draw(seed + count)
            finding = worker.judge(case)
            count += 1
            if finding is not None:
                small = smallest(worker, case, finding, 120.0)
                final = worker.judge(small) or finding
                findings.append((case.seed, final, small))
                say(f"seed {case.seed}: {final.kind}: {final.text}\n  {small.to_json()}")
    finally:
        worker.close()
    kinds = Counter(finding.kind for _, finding, _ in findings)
    say(f"{count} cases from seed {seed} on, {len(findings)} findings {dict(kinds)}")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=Path, help="a file with a case as JSON, to be judged alone")
    options = parser.parse_args()
    if options.case is None:
        return min(100, len(fuzz(options.minutes, options.seed)))
    worker = Worker()
    try:
        finding = worker.judge(Case.from_json(options.case.read_text()))
    finally:
        worker.close()
    print("as it should be" if finding is None else f"{finding.kind}: {finding.text}")
    return int(finding is not None)


if __name__ == "__main__":
    sys.exit(main())
