"""Whether thousands of steps of a loop that does what loops do, and fails where loops fail, stay exact and leave nothing.

    python -m benchmarks soak [--steps 5000] [--seed 0]       # native engine, every combination; writes results/soak.json
    MEMOPT_NATIVE=0 python -m benchmarks soak --steps 1000    # the Python engine, beside what is recorded of the other
    python -m benchmarks soak --table                         # what is recorded, as Markdown

The loop changes shapes, accumulates, trains some batches under autocast, validates, writes checkpoints and goes on from them,
raises in forward, backward, the optimizer's step, validation and while a checkpoint is written, and is interrupted there, or at
any moment by a timer (soaking/draws.py). With "tiles", there is a loss head, whose logits are read now and then, and at which
steps fail, too. The loop runs plainly, and then with each combination of techniques, all in processes of their own. After each
step, digests of losses, gradients, parameters, buffers, optimizer state and generator are compared.
samples.py says what growth is, and how much is allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.robustness.samples import leaks, table
from benchmarks.robustness.soaking.draws import draw
from benchmarks.robustness.soaking.loop import PARTS
from benchmarks.robustness.soaking.measured import COMBINATIONS, measured
from lightning_memopt import jsonio

FILE = RESULTS / "soak.json"
FOR_FAULTS = {"objects": 200, "python_blocks": 400}
"""By so much these may grow: the plain loop leaves 50 blocks itself, and something left by each fault would be 800."""
MOSTLY = 0.6
"""The least share of forwards that run as planned: of fewer, the soak proves little."""


HANGS_SECONDS = 2.0
"""A process that takes longer for a step, on average, hangs."""


def in_process(name: str, seed: int, count: int, plain: bool, digests: Path) -> dict[str, Any]:
    """`measured` for a combination, in a process of its own. Raises subprocess.TimeoutExpired where it hangs."""
    command = [sys.executable, "-m", "benchmarks.robustness.soak", "--only", name, "--steps", str(count), "--seed", str(seed)]
    command += ["--digests", str(digests), *(["--plain"] if plain else [])]
    environment = os.environ | {"MEMOPT_CACHE": "0"}
    seconds = 120 + HANGS_SECONDS * count
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=seconds)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def different(plain: Path, planned: Path, seed: int, early: bool, head: bool = False) -> list[str]:
    """The first steps that differ, in words."""
    lines = []
    pairs = zip(plain.read_text().splitlines(), planned.read_text().splitlines(), strict=True)
    for number, (a, b) in enumerate(pairs):
        if a != b:
            names = ("outcome", *PARTS)
            parts = [part for part, x, y in zip(names, json.loads(a), json.loads(b), strict=True) if x != y]
            lines.append(f"step {number}: {', '.join(parts)}; {draw(seed, number, early, head)}")
    return lines


def soaked(name: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    """The loop of a combination, plainly and planned, and how they compare. `folder`: keeps what the plain loop left."""
    early, head = COMBINATIONS[name].early, COMBINATIONS[name].head
    plain = folder / f"plain {early} {head}"
    said = plain.with_name(f"{plain.name}.json")
    planned = folder / "planned"
    if not said.exists():
        said.write_text(json.dumps(in_process(name, seed, count, True, plain)))
    result = in_process(name, seed, count, False, planned)
    lines = different(plain, planned, seed, early, head)
    before = json.loads(said.read_text())
    kept = ("growth", "first_and_last", "outcomes", "timers_landed", "modes_left", "hooks_left")
    compared = {"different": len(lines), "first": lines[:3], "plain": {key: before[key] for key in kept}}
    return {"combination": name, "seed": seed} | result | compared


def wrong(result: dict[str, Any]) -> list[str]:
    """What is wrong with a result, in words."""
    forwards = result["techniques"]["forwards"]
    share = forwards.get("planned", 0) / max(1, sum(forwards.values()))
    said = [f"{result['different']} steps differ, {result['first'][0]}"] if result["different"] else []
    said += [f"{quantity} grows" for quantity in leaks(result["growth"], **FOR_FAULTS)]
    proves = COMBINATIONS[result["combination"]].proves
    said += [f"{technique} was never on" for technique in proves if technique not in result["on"]]
    said += [f"{100 * share:.0f} % of forwards as planned"] if share < MOSTLY else []
    return said + ([f"{result['hooks_left']} hooks left"] if result["hooks_left"] else [])


def _table(results: dict[str, Any]) -> str:
    columns = {f"{r['combination']}, {r['engine']}": r for r in results.values()}
    first = next(iter(results.values()))
    return table({"plain": first["plain"]} | columns)


def _only(args: argparse.Namespace) -> int:
    print(json.dumps(measured(args.seed, args.steps, COMBINATIONS[args.only], args.plain, args.digests)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--combination", choices=COMBINATIONS, nargs="*", help="only these")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", choices=COMBINATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--digests", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only is not None:
        return _only(args)
    results: dict[str, Any] = jsonio.read(FILE) if FILE.exists() else {}
    if args.table:
        print(_table(results))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in args.combination or COMBINATIONS:
            result = soaked(name, args.seed, args.steps, Path(folder))
            results[f"{name}, {result['engine']}"] = result
            failed = failed or bool(wrong(result))
            print(f"{name}, {result['engine']}: {'; '.join(wrong(result)) or 'exact, nothing grows'}", flush=True)
            if not args.dry:
                jsonio.write(FILE, results, indent=1)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
