"""Our planner beside Moccasin's constraint solver (Bartan et al., ICML 2023), on the graphs that Moccasin published.

    git clone https://github.com/haoming-codes/moccasin /tmp/moccasin
    python -m benchmarks moccasin /tmp/moccasin                    # both planners on all graphs; half an hour
    python -m benchmarks moccasin /tmp/moccasin --only ours        # ours again; what was measured of theirs stays
    python -m benchmarks moccasin --table                          # the table of docs/measurements/moccasin.md

Both get the graph in the same order, the same budget (a share of the peak of that order), and the same seconds. Theirs runs
as its main.py does, with 16 workers on all cores (moccasin_theirs.py); ours has one thread. Durations and peaks of both are
counted by one function that is written after Moccasin's definition (moccasin_graphs.py), from the order of the runs alone.
No schedule needs less than one op reads and makes; where that is above the budget, neither is asked.

Writes benchmarks/results/moccasin.json; rows of what was not run stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.lib.paths import RESULTS
from benchmarks.papers.moccasin_graphs import SECONDS, Dag, read
from lightning_memopt import jsonio
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.solvers import planner

FILE = RESULTS / "moccasin.json"
SHARES = 0.9, 0.8
THEIRS = "from benchmarks.papers.moccasin_theirs import main; main()"


def ours(dag: Dag, budget: int, seconds: float) -> dict[str, Any]:
    """Our planner's schedule within the budget."""
    step = dag.step()
    nbytes = budget * dag.scale + planner.UNSEEN_NBYTES
    wall, cpu = perf_counter(), process_time()
    frontier = planner.solve(step, limit_seconds=seconds, budgets=(nbytes,), thorough=True)
    spent = {"seconds": round(perf_counter() - wall, 2), "cpu_seconds": round(process_time() - cpu, 2)}
    bound = frontier.bound_seconds(nbytes) * sum(dag.durations) / SECONDS
    try:
        plan = frontier.plan(nbytes)
    except InfeasibleError:
        return spent | outcome(dag, budget, None, bound)
    return spent | outcome(dag, budget, dag.schedule(step, plan.lives), bound) | {"by": plan.solver}


def theirs(clone: Path, path: Path, dag: Dag, share: float, seconds: float) -> dict[str, Any]:
    """Their solver's schedule within the budget."""
    words = ["-W", "ignore", "-c", THEIRS, str(clone), str(path), str(share), str(seconds)]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout.splitlines()[-1])
    schedule, bound = answer.pop("schedule"), answer.pop("bound")
    least = max(0.0, bound - sum(dag.durations)) if bound is not None else 0.0
    return answer | outcome(dag, budget_of(dag, share), schedule, least)


def outcome(dag: Dag, budget: int, schedule: list[int] | None, bound: float) -> dict[str, Any]:
    """Extra duration of a schedule and a bound on it, in percent of the input order's; its peak as a share of that order's."""
    peak, duration = dag.measure(range(len(dag)))
    row: dict[str, Any] = {"bound": 100 * bound / duration, "extra": None, "peak": None}
    if schedule is not None:
        its_peak, its_duration = dag.measure(schedule)
        if its_peak > budget:
            raise AssertionError(f"{dag.name}: a schedule takes {its_peak} of {budget}")
        row |= {"extra": 100 * (its_duration / duration - 1), "peak": its_peak / peak, "runs_again": len(schedule) - len(dag)}
    return row


def budget_of(dag: Dag, share: float) -> int:
    return math.ceil(dag.measure(range(len(dag)))[0] * share)


def graphs(clone: Path) -> dict[str, Path]:
    """Name -> file of every graph in the clone."""
    return {short(path.stem): path for path in sorted((clone / "data").glob("*.json"))}


def short(stem: str) -> str:
    """A graph's name: that of the network and "train" or "test", or "random" and its number of ops."""
    if stem.startswith("random_layered_n"):
        return f"random {stem.removeprefix('random_layered_n').partition('_')[0]}"
    return f"{stem.partition(' (')[0]} {'train' if '_train_' in stem else 'test'}"


def cell(measured: dict[str, Any]) -> str:
    return "none found" if measured["extra"] is None else f"+{measured['extra']:.3f} %"


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/measurements/moccasin.md."""
    head = "graph", "ops", "budget", "ours", "no schedule less than", "seconds, CPU", "Moccasin", "its bound", "seconds, CPU"
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        if not row["feasible"]:
            continue
        cells = [row["graph"], str(row["ops"]), f"{row['share']:.0%}"]
        for measured in (row.get("ours"), row.get("theirs")):
            if measured is None:
                cells += ["", "", ""]
            else:
                took = f"{measured['seconds']:.1f}, {measured['cpu_seconds']:.1f}"
                cells += [cell(measured), f"+{measured['bound']:.3f} %" if measured["bound"] else "none", took]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, nargs="?", help="a clone of github.com/haoming-codes/moccasin")
    parser.add_argument("--graphs", nargs="+", help="names as in the table")
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each planner for each budget")
    parser.add_argument("--table", action="store_true", help="print the table of the results, and measure nothing")
    args = parser.parse_args()
    kept: list[dict[str, Any]] = jsonio.read(FILE)["rows"] if FILE.exists() else []
    rows = {(row["graph"], row["share"]): row for row in kept}
    if not args.table and args.clone is None:
        parser.error("name the folder of the clone")
    for name, path in () if args.table else graphs(args.clone.resolve()).items():
        if args.graphs and name not in args.graphs:
            continue
        dag = read(path)
        peak, duration = dag.measure(range(len(dag)))
        for share in SHARES:
            row = rows.setdefault((name, share), {})
            budget = budget_of(dag, share)
            row |= {
                "graph": name, "ops": len(dag), "share": share, "peak": peak, "duration": duration, "floor": dag.floor / peak,
                "feasible": dag.floor <= budget, "limit_seconds": args.seconds,
            }  # fmt: skip
            if row["feasible"] and args.only != "theirs":
                row["ours"] = ours(dag, budget, args.seconds)
            if row["feasible"] and args.only != "ours":
                row["theirs"] = theirs(args.clone.resolve(), path, dag, share, args.seconds)
            print(name, share, {key: row.get(key) for key in ("feasible", "ours", "theirs")}, flush=True)
            command = f"python -m benchmarks moccasin CLONE --seconds {args.seconds:g}"
            said = {"command": command, "torch": version("torch"), "ortools": version("ortools"), "cores": os.cpu_count()}
            jsonio.write(FILE, said | {"rows": list(rows.values())}, indent=1)
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
