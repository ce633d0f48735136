"""What runs on a GPU, beside stock tools, on the same models in the same run.

    python -m benchmarks gpu COMMAND ... [NAME ...] [--seconds 400] [--device cuda] [--small]

Commands: `replay` (module `replay`), `offload`, `compress` (`away`, `codecs`), `batch` (`batch`).
Several run one after the other and share the time, within a command its models do. What does not fit in is left out, with the
reason. Writes gpu_COMMAND.json to $OUT, else to benchmarks/results, anew after each model; tables come last. `--device cpu
--small`, or `--smoke`: tiny models on the CPU, the same code, with a disk in the place of page-locked memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins: matrix products in the same order every time

import torch

from benchmarks.gpu import away, batch, codecs, replay
from benchmarks.gpu.bench import table
from benchmarks.lib.paths import RESULTS
from benchmarks.models.gpu import MODELS, SMOKE, Build

COMMANDS = ("replay", "offload", "compress", "batch")
_RUNS = 5
_AWAY = {False: ["GPT-2 medium", "ResNet-152"], True: ["GPT-2", "ResNet"]}
"""By default, models whose maps are away: without dropout's masks there would be little for codecs."""


def _results(
    command: str, names: list[str], device: torch.device, seconds: float, args: Any, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All models of one command, each within an equal share of the time that is left. `write` is called after each."""
    models = SMOKE if args.small else MODELS
    chosen = names or (_AWAY[args.small] if command in ("offload", "compress") else list(models))
    end = time.perf_counter() + seconds
    results: dict[str, Any] = {}
    for i, name in enumerate(chosen):
        share = (end - time.perf_counter()) / (len(chosen) - i)
        try:
            results[name] = _result(command, name, models[name], device, share, args)
        except ModuleNotFoundError as error:
            results[name] = {"left_out": f"{error.name} is not installed"}
        write(results)
        print(f"{command}, {name}: {results[name].get('left_out', 'done')}", flush=True)
    return results


def _result(command: str, name: str, build: Build, device: torch.device, seconds: float, args: Any) -> dict[str, Any]:
    if command == "replay":
        return replay.replay(name, build, device, seconds, args.rounds, args.compile)
    one = {"batch": batch.batch, "offload": away.offload, "compress": away.compress}[command]
    return one(name, build, device, seconds, args.rounds)


def _run(commands: list[str], names: list[str], device: torch.device, args: Any) -> None:
    out = Path(os.environ.get("OUT") or RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    end, tables = time.perf_counter() + args.seconds, []
    for i, command in enumerate(commands):
        share = (end - time.perf_counter()) / (len(commands) - i)
        report: dict[str, Any] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "smoke": args.small,
        }
        began = time.perf_counter()
        if command == "compress":
            report["codecs"] = codecs.codecs(device, codecs.SMALL if args.small else codecs.LARGE)
            tables.append(table({"GB/s": {"rows": report["codecs"]}}, codecs.COLUMNS))
        suffix = "" if on_gpu and not args.small else "_smoke"
        path = out / f"gpu_{command}{suffix}.json"

        def write(models: dict[str, Any], path: Path = path, report: dict[str, Any] = report) -> None:
            path.write_text(json.dumps(report | {"models": models}, indent=1) + "\n")

        report["models"] = _results(command, names, device, share - (time.perf_counter() - began), args, write)
        columns = {"replay": replay.COLUMNS, "batch": batch.COLUMNS}.get(command, away.COLUMNS)
        tables.append(table(report["models"], columns))
    print("\n\n".join(tables))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="COMMAND|NAME", help=f"of {', '.join(COMMANDS)}; of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--smoke", action="store_true", help="--device cpu --small")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything together")
    parser.add_argument("--rounds", type=int, default=_RUNS)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_intermixed_args(argv)
    args.small |= args.smoke
    device = torch.device("cpu") if args.smoke or args.device == "cpu" else torch.device("cuda", 0)
    commands = [word for word in args.words if word in COMMANDS]
    names = [word for word in args.words if word not in COMMANDS]
    known = SMOKE if args.small else MODELS
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --smoke runs the same code on the CPU")
    if device.type == "cpu" and not args.small:
        sys.exit("these models are too large for a CPU; add --small")
    if not commands or set(names) - set(known):
        unknown = ", ".join(sorted(set(names) - set(known))) or "no command"
        sys.exit(f"unknown {unknown}; there are {', '.join((*COMMANDS, *known))}")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        _run(commands, names, device, args)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


if __name__ == "__main__":
    main()
