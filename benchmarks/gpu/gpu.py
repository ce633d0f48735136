"""The first things to run on a GPU, in the order of risk, within a given number of minutes: docs/first_gpu_run.md.

    python -m benchmarks gpu --minutes 9 --out DIR            # what has no result in DIR/results.jsonl yet
    python -m benchmarks gpu --minutes 9 --out DIR replay     # the parts of this name, or whose names begin so
    python -m benchmarks gpu --list                           # the parts: about how long each takes, what it proves

Each part is a process of its own, with a limit. Each result is a line of DIR/results.jsonl as soon as it is made. A part is
begun where it fits into what is left of the minutes, and what runs when they are over is stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu import lines, machine, runner
from benchmarks.gpu.parts import Part, chosen
from benchmarks.lib.paths import RESULTS

EMULATED = "emulated CUDA device"
"""The name of the device of tests/emulated, which has neither times nor joules."""


def main(words: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="the folder of results.jsonl")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--small", action="store_true", help="benchmarks take tiny models")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args(words)
    try:
        parts = chosen(args.parts, args.small)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for part in parts:
            print(f"{part.name:24} {part.seconds:4.0f} s  {part.proves}")
        return 0
    found = machine.described()
    if found is None:
        print("there is no CUDA device here that answers", file=sys.stderr)
        return 1
    if found["device"] == EMULATED and args.out.resolve().is_relative_to(RESULTS):
        print(f"what an emulated device gives is not a result: write it outside of {RESULTS}", file=sys.stderr)
        return 1
    path = args.out / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines.append(path, kind="machine", at=at, command=[sys.executable, *sys.argv], minutes=args.minutes, **found)
    print(f"{found['device']}, driver {found['driver']}, torch {found['torch']}: {path}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is stopped, too
    runner.run(parts, path, began + 60 * args.minutes, args.again, lambda text: print(text, flush=True))
    return summary(parts, path)


def summary(parts: list[Part], path: Path) -> int:
    """Print what is known of each part; 1 where one failed, 0 where none did."""
    known, bad = lines.outcomes(path), 0
    print()
    for part in parts:
        outcome = known.get(part.name)
        reason = outcome.ended["reason"] if outcome and outcome.ended else ""
        print(f"{part.name:24} {outcome.status if outcome else 'to be run':12} {reason}".rstrip())
        if outcome is None:
            continue
        bad += outcome.status in ("failed", "crashed", "timed out")
        for name in outcome.named("failed"):
            message = [text for text in outcome.tests[name].get("message", "").splitlines() if text.strip()]
            print(f"    {name}: {next((text for text in message if text.startswith('E ')), (message or [''])[-1])[:160]}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
