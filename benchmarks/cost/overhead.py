"""What both engines cost an op over eager, beside an empty dispatch mode with detaching hooks. 4 x 4 tensors: pure overhead.

    python -m benchmarks overhead [-o benchmarks/results/overhead.json]
    python -m benchmarks overhead --profile       # instructions of an op, by valgrind (instructions.py)

Paired and interleaved; medians of this thread's CPU time. Forward: for each op. Backward: for each op that runs again, the op
itself included; `op` is what such an op takes when it runs by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.cost import instructions
from benchmarks.lib.tiny_ops import OPS, TinyOps

ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the figures are written")
    parser.add_argument("--profile", action="store_true", help="count instructions in the place of time")
    options = parser.parse_args()
    figures = instructions.measured() if options.profile else measured()
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def measured() -> dict[str, object]:
    tiny = TinyOps()
    forward: dict[str, list[float]] = {name: [] for name in tiny.contexts}
    backward: dict[str, list[float]] = {name: [] for name in tiny.contexts}
    clock = time.thread_time
    for _ in range(ROUNDS):
        for name in tiny.contexts:
            gc.collect()
            gc.disable()
            began = clock()
            y = tiny.forward(name)
            forward[name].append(clock() - began)
            loss = y.sum()
            began = clock()
            loss.backward()
            backward[name].append(clock() - began)
            gc.enable()
            del y, loss
    run = torch.ops.aten.tanh.default._op
    began = clock()
    for _ in range(10_000):
        run(tiny.x)
    op = 1e6 * (clock() - began) / 10_000
    eager = statistics.median(forward["eager"])
    table = {name: 1e6 * (statistics.median(seconds) - eager) / OPS for name, seconds in forward.items()}
    print(f"eager: {1e6 * eager / OPS:.2f} us an op; op: {op:.2f} us")
    rebuilds = {}
    for name, over in table.items():
        again = tiny.again.get(name, 0)
        line = f"{name:32} {over:6.2f} us an op over eager"
        if again:
            more = statistics.median(a - b for a, b in zip(backward[name], backward["eager"], strict=True))
            rebuilds[name] = 1e6 * more / again
            line += f"; backward: {rebuilds[name]:.2f} us for each of {again} ops that run again"
        print(line)
    return {"eager_us": 1e6 * eager / OPS, "op_us": op, "over_eager_us": table, "again_us": rebuilds}


if __name__ == "__main__":
    main()
