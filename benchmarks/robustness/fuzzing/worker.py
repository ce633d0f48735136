"""Judge cases that come as lines of JSON, and answer each with a line: kind and text of what is wrong, or empty ones."""

from __future__ import annotations

import json
import sys
import traceback

import torch

from benchmarks.robustness.fuzzing.case import Case
from benchmarks.robustness.fuzzing.loop import Loop, read
from benchmarks.robustness.fuzzing.loop_runs import judge_loop
from benchmarks.robustness.fuzzing.runs import Finding, judge


def judged(case: Case | Loop) -> Finding | None:
    """What is wrong with a case of either kind."""
    return judge_loop(case) if isinstance(case, Loop) else judge(case)


def answer(line: str) -> Finding | None:
    try:
        return judged(read(line))
    except Exception as error:  # of the fuzzer itself, or of ours outside of a step
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(f"raised {type(error).__name__}", f"{error} ({where.filename}:{where.lineno})")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin:
        finding = answer(line)
        print(json.dumps(["", ""] if finding is None else [finding.kind, finding.text]), flush=True)


if __name__ == "__main__":
    main()
