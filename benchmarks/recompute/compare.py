"""`memopt bench` on the models of the benchmarks: every method that saves memory, side by side, at its budgets and peaks.

    python -m benchmarks compare gpt2 resnet50 --rounds 5
    python -m benchmarks compare --table        # each method beside ours at its peak, of all that is in results/compare

All other arguments are those of `memopt bench`; results go to results/compare. It writes bench.json after each row, then
bench.md, bench.svg and bench.png.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt.bench import command, results, tables
from lightning_memopt.errors import MemOptError


class Table(argparse.Action):
    """Prints the summaries of the recorded comparisons, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        folder = RESULTS / "compare"
        for path in sorted(folder.rglob("bench.json")):
            data, parts = results.read(path), path.parent.relative_to(folder).parts
            for model, rows in data["models"].items():
                heading = "/".join(dict.fromkeys([*parts, model]))
                lines = [f"## {heading}", "", f"{data['asked']['rounds']} rounds.", "", *tables.summary(rows), ""]
                print("\n".join(lines))
        parser.exit()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=(__doc__ or "").partition("\n")[0])
    command.add_arguments(parser)
    parser.add_argument("--table", nargs=0, action=Table, help="print what is recorded")
    parser.set_defaults(out=RESULTS / "compare")
    try:
        return command.run(parser.parse_args(), MODELS)
    except MemOptError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
