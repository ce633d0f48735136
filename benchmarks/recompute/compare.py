"""`memopt bench` on the models of the benchmarks: every method that saves memory, side by side, at its budgets and peaks.

    python -m benchmarks compare gpt2 resnet50 --rounds 5

All arguments are those of `memopt bench`; results go to results/compare. It writes bench.json after each row, then bench.md,
bench.svg and bench.png.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt import cli
from lightning_memopt.bench import command
from lightning_memopt.errors import MemOptError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=(__doc__ or "").partition("\n")[0])
    command.add_arguments(parser)
    parser.set_defaults(out=RESULTS / "compare")
    try:
        return command.run(parser.parse_args(), cli._factory, MODELS)
    except MemOptError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
