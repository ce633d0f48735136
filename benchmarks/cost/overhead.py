"""What both engines cost an op over eager, beside an empty dispatch mode with detaching hooks. Tiny tensors: pure overhead.

    python -m benchmarks overhead [-o benchmarks/results/overhead.json]

Paired and interleaved; medians of this thread's CPU time. Forward: for each op. Backward: for each op that runs again, the op
itself included; `op_us` is what such an op takes when it runs by itself. Pack and unpack: of a tensor that the plan keeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from functools import cache
from pathlib import Path

import torch

from benchmarks.cost.tiny_ops import MODELS, TinyOps

ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the figures are written")
    options = parser.parse_args()
    figures = measured()
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def measured() -> dict[str, object]:
    """Model -> figures. Prints them."""
    return {name: of_model(name) for name in MODELS}


def of_model(name: str) -> dict[str, object]:
    tiny = TinyOps(name)
    forward: dict[str, list[float]] = {name: [] for name in tiny.contexts}
    backward: dict[str, list[float]] = {name: [] for name in tiny.contexts}
    clock = time.thread_time
    for _ in range(ROUNDS):
        for context in tiny.contexts:
            gc.collect()
            gc.disable()
            began = clock()
            y = tiny.forward(context)
            forward[context].append(clock() - began)
            loss = y.sum()
            began = clock()
            loss.backward()
            backward[context].append(clock() - began)
            gc.enable()
            del y, loss
    eager = statistics.median(forward["eager"])
    print(f"{name}, {tiny.ops} ops: eager {1e6 * eager / tiny.ops:.2f} us an op; an op of {_op():.2f} us by itself")
    over, rebuilds, packs = {}, {}, {}
    for context in tiny.contexts:
        over[context] = (
            1e6 * statistics.median(a - b for a, b in zip(forward[context], forward["eager"], strict=True)) / tiny.ops
        )
        line = f"{context:32} {over[context]:6.2f} us an op over eager"
        again = tiny.again.get(context, 0)
        if again:
            more = statistics.median(a - b for a, b in zip(backward[context], backward["eager"], strict=True))
            rebuilds[context] = 1e6 * more / again
            line += f"; backward: {rebuilds[context]:.2f} us for each of {again} ops that run again"
        if context in tiny.again:
            packs[context] = 1e3 * statistics.median(tiny.packing(context) for _ in range(9))
            line += f"; pack and unpack: {packs[context]:.2f} us"
        print(line, flush=True)
    return {"eager_us": 1e6 * eager / tiny.ops, "op_us": _op(), "over_eager_us": over, "again_us": rebuilds, "pack_us": packs}


@cache
def _op() -> float:
    """Microseconds of one op, without autograd."""
    x, run = torch.randn(4, 4), torch.ops.aten.tanh.default._op
    began = time.thread_time()
    for _ in range(10_000):
        run(x)
    return 1e6 * (time.thread_time() - began) / 10_000


if __name__ == "__main__":
    main()
