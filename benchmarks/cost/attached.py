"""What the package itself takes: up to the first steady planned step, and with a plan that has nothing to do.

    python -m benchmarks attached [--rounds 25] [--starts 3]     # writes results/attached.json
    python -m benchmarks attached --only start --profile         # the steps up to the plan by function; nothing is written
    python -m benchmarks attached --table

*Start*: GPT-2 of 8 layers through `optimize` in plain PyTorch, within half of its unmodified peak. Each start is a process of
its own, so nothing is known beforehand; only the native engine is built. Counted: opening and closing the run, what observed
steps (verified and metered ones among them) take beyond plain steps, the solve, and what the first two planned steps, verified
and measured, take beyond steady planned ones. *At rest*: steps of a model with a plan whose budget is above the peak, against
those of the same model in a process that never opened a run, paired in turns. A third process, plain as well, says how far two
equal processes are apart. *Own*: CPU time that the session's own functions take in such a step, by clocks around them; that is
steadier than the difference of two steps, but leaves out what they do to the rest. Medians; CPU time is the steadier figure.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import torch

from benchmarks.cost.observed import OfRegistry
from benchmarks.cost.planning import eager_step
from benchmarks.lib.paths import RESULTS, ROOT
from lightning_memopt import jsonio, optimize
from lightning_memopt.integrations.plain import Run, _Call
from lightning_memopt.session.session import Session

FILE = RESULTS / "attached.json"
RUN = 1000
"""Steps of the run that a start is a share of."""
WARM, STEADY, FIRST = 3, 10, 2
"""Steps before others are timed; timed steps, plain and planned; planned steps that belong to the start."""
MODELS = {"gpt2": 1, "resnet50": 4}
"""Model -> steps of a turn."""
ROOM: dict[str, Any] = {"budget": "100%", "solver_seconds": 0.1, "verbose": False}
"""A budget that needs no search."""
KINDS = ("plain", "attached", "plain again")
Seconds = tuple[float, float]
"""Wall time and CPU time."""


def timed(step: Callable[[], Any]) -> Seconds:
    wall, cpu = perf_counter(), process_time()
    step()
    return perf_counter() - wall, process_time() - cpu


def median(times: list[Seconds]) -> Seconds:
    return statistics.median(w for w, _ in times), statistics.median(c for _, c in times)


def beyond(times: list[Seconds], each: Seconds) -> Seconds:
    """What these steps take in all, beyond as many that take `each`."""
    return sum(w for w, _ in times) - len(times) * each[0], sum(c for _, c in times) - len(times) * each[1]


# -- the processes that are measured ---------------------------------------------------------------------


def start(name: str, budget: int, profiled: bool) -> dict[str, Any]:
    """One run from its beginning, in this process."""
    training = OfRegistry(name)

    def step() -> None:
        eager_step(training)

    for _ in range(WARM):
        step()
    plain = median([timed(step) for _ in range(STEADY)])
    profiler = cProfile.Profile() if profiled else None
    gc.collect()
    with contextlib.ExitStack() as stack:
        runs: list[Run] = []
        within = optimize(training.model, training.optimizer, budget=budget, verbose=False)
        opened = timed(lambda: runs.append(stack.enter_context(within)))
        run, observed = runs[0], list[Seconds]()
        with profiler or contextlib.nullcontext():
            while run.plan is None:
                observed.append(timed(step))
            first = [timed(step) for _ in range(FIRST)]
        steady = median([timed(step) for _ in range(STEADY)])
        status = run.status()
        closed = timed(stack.close)
    assert run.plan is not None
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    parts = {"observed steps and the solve": beyond(observed, plain), "first planned steps": beyond(first, steady)}
    parts["open and close"] = opened[0] + closed[0], opened[1] + closed[1]
    return {
        "plain": plain,
        "steady": steady,
        "observed": observed,
        "solve_seconds": run.plan.solve_seconds,
        "parts": parts,
        "within_budget": status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget,
        "share": [sum(part[i] for part in parts.values()) / (RUN * plain[i]) for i in (0, 1)],
    }


def unmodified_nbytes(name: str) -> int:
    """The peak of the unmodified step, as the planner predicts it."""
    training = OfRegistry(name)
    with optimize(training.model, training.optimizer, profile_steps=1, **ROOM) as run:
        while run.plan is None:
            eager_step(training)
        return run.plan.unmodified_peak_nbytes


@contextlib.contextmanager
def clocked() -> Iterator[list[float]]:
    """CPU seconds of each call of what a front calls of a session."""
    took: list[float] = []

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took.append(process_time() - began)

        return run

    with contextlib.ExitStack() as stack:
        for owner, names in ((_Call, ("__init__", "__enter__", "__exit__")), (Session, ("update_begins", "update_ended"))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, timing(getattr(owner, name))))
        yield took


def own(name: str) -> dict[str, float]:
    """CPU seconds of our own functions in a step with nothing to do, and of that step."""
    training = OfRegistry(name)
    mine, steps = list[float](), list[float]()
    with optimize(training.model, training.optimizer, **ROOM) as run:
        for _ in range(2 * WARM):
            eager_step(training)
        assert run.plan is not None and not run.plan.predicted.rebuilt_ops
        for _ in range(2 * STEADY):
            with clocked() as took:
                steps.append(timed(lambda: eager_step(training))[1])
            mine.append(sum(took))
    return {"own": statistics.median(mine), "step": statistics.median(steps)}


def turns(name: str, attached: bool, steps: int) -> None:
    """Turns of `steps` steps of one kind, one for each line of the standard input."""
    training = OfRegistry(name)

    def turn() -> None:
        for _ in range(steps):
            eager_step(training)

    within = optimize(training.model, training.optimizer, **ROOM)
    with within if attached else contextlib.nullcontext() as run:
        for _ in range(2 * WARM):
            turn()
        if run is not None:
            assert run.plan is not None and not run.plan.predicted.rebuilt_ops and run.status().measured_peak_nbytes
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(timed(turn)), flush=True)


# -- the process that starts them ------------------------------------------------------------------------


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.cost.attached", "--worker", *words]


def _answer(*words: str) -> Any:
    """What a process of its own says in its last line."""
    lines = subprocess.run(_command(*words), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return json.loads(lines[-1])


@contextlib.contextmanager
def _worker(*words: str) -> Iterator[Callable[[], Seconds]]:
    """A process that takes turns; calling the result gives it one."""
    process = subprocess.Popen(_command(*words), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    wants, says = process.stdin, process.stdout
    try:
        while (line := says.readline()) != "ready\n":
            assert line, "the process ended"

        def turn() -> Seconds:
            wants.write("\n")
            wants.flush()
            wall, cpu = json.loads(says.readline())
            return wall, cpu

        yield turn
    finally:
        wants.close()
        process.wait()


def starts(name: str, count: int, profiled: bool) -> dict[str, Any]:
    budget = _answer("peak", name) // 2
    rows = [_answer("start", name, str(budget), *(["--profile"] if profiled else [])) for _ in range(count)]
    middle = sorted(rows, key=lambda row: row["share"][1])[len(rows) // 2]
    return {"budget_nbytes": budget, "starts": rows, "median": middle}


def at_rest(name: str, rounds: int, sets: int, steps: int) -> dict[str, Any]:
    """Ratios to the plain step of the same round, over all rounds of `sets` sets of processes. `steps`: of a turn."""
    ratios: dict[str, list[Seconds]] = {kind: [] for kind in KINDS[1:]}
    plain: list[Seconds] = []
    for _ in range(sets):
        with contextlib.ExitStack() as stack:
            workers = {kind: stack.enter_context(_worker("turns", name, kind, str(steps))) for kind in KINDS}
            for i in range(rounds):
                order = [*KINDS[i % 3 :], *KINDS[: i % 3]]
                took = {kind: workers[kind]() for kind in order}
                plain.append(took["plain"])
                for kind, of_kind in ratios.items():
                    of_kind.append((took[kind][0] / took["plain"][0], took[kind][1] / took["plain"][1]))
    return {
        "rounds": rounds,
        "own": _answer("own", name),
        "sets": sets,
        "steps": steps,
        "plain_ms": [1e3 * t / steps for t in median(plain)],
        "ratios": {kind: median(values) for kind, values in ratios.items()},
        "ratios_of_sets": {kind: [median(v[i : i + rounds]) for i in range(0, len(v), rounds)] for kind, v in ratios.items()},
    }


def table(results: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, row in results.get("start", {}).items():
        middle = row["median"]
        lines += [f"| {name} | wall, s | CPU, s |", "|---|---|---|"]
        lines += [f"| a plain step | {middle['plain'][0]:.3f} | {middle['plain'][1]:.3f} |"]
        lines += [f"| {part} | {wall:.2f} | {cpu:.2f} |" for part, (wall, cpu) in middle["parts"].items()]
        shares = " | ".join(f"**{100 * share:.2f} %**" for share in middle["share"])
        lines += [f"| in all, of {RUN:,} plain steps | {shares} |", ""]
    rest = results.get("at rest", {})
    if rest:
        lines += [
            "| at rest | plain step, CPU ms | own, CPU ms | of the step | CPU time | wall time | a second plain process |",
            "|---|---|---|---|---|---|---|",
        ]
    for name, row in rest.items():
        attached, again = row["ratios"]["attached"], row["ratios"]["plain again"]
        mine = row["own"]["own"], row["own"]["own"] / row["own"]["step"]
        cells = f"{row['plain_ms'][1]:.1f} | {1e3 * mine[0]:.2f} | {100 * mine[1]:.2f} %"
        cells += f" | x{attached[1]:.3f} | x{attached[0]:.3f} | x{again[1]:.3f} (x{again[0]:.3f})"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _work(words: list[str], profiled: bool) -> None:
    """What a process of its own does."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    what, name, *more = words
    if what == "turns":
        turns(name, more[0] == "attached", int(more[1]))
    elif what == "own":
        print(json.dumps(own(name)))
    else:
        print(json.dumps(unmodified_nbytes(name) if what == "peak" else start(name, int(more[0]), profiled)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--starts", type=int, default=3, help="processes that start a run")
    parser.add_argument("--sets", type=int, default=1, help="sets of processes that take turns, for each model")
    parser.add_argument("--only", choices=("start", "rest"), help="one of the two")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="at rest")
    parser.add_argument("--profile", action="store_true", help="print profiles of the starts; nothing is written")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(args.worker, args.profile)
        return 0
    results: dict[str, Any] = jsonio.read(FILE) if FILE.exists() else {}

    def keep(part: str, name: str, row: dict[str, Any]) -> None:
        results.setdefault(part, {})[name] = row
        if not args.profile:
            jsonio.write(FILE, results | {"torch": torch.__version__}, indent=1)

    if not args.table:
        if args.only != "rest":
            keep("start", "gpt2", starts("gpt2", args.starts, args.profile))
        for name in () if args.only == "start" else args.models:
            keep("at rest", name, at_rest(name, args.rounds, args.sets, MODELS[name]))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
