"""What counting costs: nanoseconds an allocation and its free take through our allocator beyond torch's own.

    python -m benchmarks meter > meter.json

Paired and interleaved rounds in this thread's CPU time, both within the same second; the median of the differences.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch

from lightning_memopt.native import Counter, install

SIZES = (64, 4096, 65536, 1 << 20)
ROUNDS, TIMES = 101, 2000


def exercised(counter: Counter, nbytes: int, counted: bool) -> float:
    """Nanoseconds of one allocation and its free."""
    began = time.thread_time_ns()
    counter.exercise(nbytes, TIMES, int(counted))
    return (time.thread_time_ns() - began) / TIMES


def measured(counter: Counter, nbytes: int) -> dict[str, float]:
    pairs = []
    for i in range(ROUNDS):
        first = exercised(counter, nbytes, bool(i % 2))
        second = exercised(counter, nbytes, not i % 2)
        pairs.append((second, first) if i % 2 else (first, second))
    return {
        "nbytes": nbytes,
        "torch_ns": round(statistics.median(torchs for torchs, _ in pairs), 1),
        "added_ns": round(statistics.median(ours - torchs for torchs, ours in pairs), 1),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    counter = install(lambda line: print(line, file=sys.stderr))
    if counter is None:
        raise SystemExit("there is no native meter on this machine")
    held = [torch.empty(1) for _ in range(10_000)]  # as many as a large training has alive
    rows = [measured(counter, nbytes) for nbytes in SIZES]
    machine = {"torch": str(torch.__version__), "cpu": platform.processor() or platform.machine()}
    print(json.dumps({"machine": machine, "alive": len(held), "sizes": rows}, indent=1))


if __name__ == "__main__":
    main()
