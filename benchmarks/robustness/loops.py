"""Training loops as people write them, plainly and within three budgets: exact, kept, never silent?

    python -m benchmarks loops [NAME...] [--json FILE] [--table FILE] [--jobs 2] [--list]
    python -m benchmarks loops [NAME...] --moving

Every script of `scripts` trains plainly, then within the plain run's true peak (100 %), within what is there between
its steps and half of what a step has on top (half), and by the smallest plan (min). A refusal is counted, and the run repeated
within the number that it names. Losses, parameters, buffers, averages, optimizer state and generators must be the plain run's
bit by bit; every planned step's peak within the budget, by an allocator count that is not part of the package; and if no
plan is in force, a line must say why. --json adds to what the file has of other scripts; --table writes the page from it.

--moving: once, by the smallest plan, with a disk for activations, optimizer state, gradients and frozen weights, and updates in
backward where they are exact. If state, gradients or frozen weights could be parked and are not, a line must say why. --json
has less of each script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import threading
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.robustness.loops_judge import BUDGETS, OBSERVED_SHARE, RESTS, examine, prediction_error, why_no_plan
from benchmarks.robustness.scripts import LOOPS
from benchmarks.robustness.worker import Done, Row, ask

FILE = RESULTS / "loops.json"
TIMEOUT_SECONDS = 3600.0
"""For all runs of a loop. A run that does not end is ended long before (loops_run.py)."""
_MOVING = "moving "
"""What a worker is told before the name of a script that runs so."""
_WRONG = 0.01
_OFF = {
    "two runs whose steps overlap: each counts what the other one took without a plan": ("gan_two_blocks", "two_in_turns"),
    "batches of another size or another way through the model, of which the largest that was observed is planned": (
        "experts", "longer_and_longer", "neural_ode", "picture_lists", "recursive", "translation", "word_by_word",
    ),
    "steps that do more from some step on, which nobody foresees": (
        "gru_teacher", "logs_now_and_then", "state_in_hooks", "unrolled",
    ),
    "the history and the line search of LBFGS, which count as if they were full": ("physics", "waves"),
    "2 KiB of a batch that is drawn before the first forward": ("adversaries_in_one",),
}  # fmt: skip
"""Why a prediction is off by more than 1 %: cause -> loops."""
_PEAKS = ("peak, predicted / measured", "observed / plain")
_PARKED = {"parked": "state", "gradients_parked": "gradients", "weights_parked": "weights"}
_BRIEF = ("faults", "error", "exact", "over", "steps", "planned_steps", "predicted", "measured", *RESTS)
_HEAD = ("loop", "resident", "peak", "exact", "kept", "plan", "refusals", "solves", *_PEAKS)


# -- processes ------------------------------------------------------------------------------------------


def missing(name: str) -> str | None:
    """The package that a script needs and that is not installed."""
    packages = [need.partition(".")[0] for need in LOOPS[name].needs]
    return next((package for package in packages if importlib.util.find_spec(package) is None), None)


def work() -> None:
    """Read names, answer each with a line of JSON."""
    from benchmarks.robustness.loops_run import MOVING, forked

    for line in sys.stdin:
        moving, name = line.startswith(_MOVING), line.removeprefix(_MOVING).strip()
        script = LOOPS[name]
        for need in script.needs:
            importlib.import_module(need)  # once, not in every run
        if moving:
            script = replace(script, options={**script.options, **MOVING})
        print(json.dumps(examine(partial(forked, script), BUDGETS[-1:] if moving else BUDGETS)), flush=True)


def measure(names: list[str], jobs: int, done: Done, moving: bool = False) -> None:
    """Run these scripts."""
    left = []
    for name in names:
        package = missing(name)
        if package is None:
            left.append(_MOVING * moving + name)
        else:
            done(name, {"status": f"not installed: {package}", "runs": {}})

    def answered(line: str, row: Row) -> None:
        done(line.removeprefix(_MOVING), {"runs": {}} | row)

    ask("benchmarks.robustness.loops", left, jobs, answered, TIMEOUT_SECONDS)


# -- what is printed and written --------------------------------------------------------------------------


def _kib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024:,.1f}"


def _exact(run: dict[str, Any]) -> str:
    if "exact" not in run:
        return "-"
    return "yes" if run["exact"] else f"**no**: {', '.join(run['different'][:2])}"


def _kept(run: dict[str, Any]) -> str:
    if run.get("over") is None:
        return "-"
    excess = f"{_kib(run['over'])} over in {run['steps_over']}"
    if run["over"] <= 0:
        return "yes"
    if run["not_kept_said"]:
        return f"no, which a line says: {excess}"
    return f"**no**, {excess}" if run["faults"] else f"but for steps unlike all before: {excess}"


def _plan(run: dict[str, Any]) -> str:
    if "error" in run:
        return f"**{', '.join(run['faults'])}**: {run['error'][:80]}"
    if not run["planned_steps"]:
        return f"none: {why_no_plan(run)[:100]}" if "silent" not in run["faults"] else "**none, silent**"
    what = f"rebuilds {_kib(run['dropped'])}" if run["dropped"] else "keeps all"
    for name, words in _PARKED.items():
        what += f", parks {_kib(run[name])} of {words}" if run.get(name) else ""
    steps, planned = run["steps"], run["planned_steps"]
    return what if 2 * planned > steps else f"{what}, in {planned} of {steps} steps"


def _refusals(run: dict[str, Any]) -> str:
    return f"**{run['refusals']}**" if run["refusals"] > 1 else str(run["refusals"])


def _solves(run: dict[str, Any]) -> str:
    return f"{run['solves']}, {run['solve_seconds']:.1f} s" if "solves" in run else "-"


def _peaks(run: dict[str, Any]) -> str:
    return f"{_kib(run.get('predicted'))} / {_kib(run.get('measured'))}"


def _observed(run: dict[str, Any]) -> str:
    return "-" if run.get("observed") is None else f"{run['observed']:.2f}"


def cells(name: str, row: Row) -> list[str]:
    """Bytes in KiB. A cell has the three budgets' in turn, or one where they agree."""
    if not row["runs"]:
        return [name, "", "", "", "", row["status"], "", "", "", ""]
    found = [name, _kib(row["resident"]), _kib(row["peak"])]
    for cell in (_exact, _kept, _plan, _refusals, _solves, _peaks, _observed):
        parts = [cell(row["runs"][budget]) for budget in BUDGETS]
        found.append(parts[0] if len(set(parts)) == 1 else "; ".join(parts))
    return found


def line_of(name: str, row: Row) -> str:
    if not row["runs"]:
        return f"{name:24} {row['status']} {row.get('error', '')}"
    parts = []
    for budget, run in row["runs"].items():
        parts.append(f"{budget}: {', '.join(run['faults']) or 'ok'} ({_plan(run)[:90]}, {run['refusals']} ref, {_solves(run)})")
    return f"{name:24} " + " | ".join(parts)


def brief(row: Row) -> Row:
    """Of the results of a script that runs with --moving, those that say whether all is well and what was parked."""
    runs = {budget: {name: run[name] for name in _BRIEF if name in run} for budget, run in row["runs"].items()}
    return {name: row[name] for name in ("status", "peak", "resident") if name in row} | {"runs": runs}


def summary(rows: dict[str, Row]) -> str:
    """How many loops and runs there were, and how many of each fault."""
    ran = [row for row in rows.values() if row["runs"]]
    runs = [run for row in ran for run in row["runs"].values()]
    faults = [fault for run in runs for fault in run["faults"]]
    counts = ", ".join(f"{faults.count(fault)} {fault}" for fault in sorted(set(faults))) or "no fault"
    text = f"{len(ran)} loops, {len(runs)} runs: {counts}; {len(rows) - len(ran)} loops not run"
    errors = [abs(error) for run in runs if (error := prediction_error(run)) is not None]
    if errors:
        wrong = sum(error > _WRONG for error in errors)
        text += f"; predictions are off by {statistics.median(errors):.2%} in the median"
        text += f", by more than {_WRONG:.0%} in {wrong} runs"
    return text


def _reasons(rows: dict[str, Row]) -> list[str]:
    """Lines of a list: the loops whose predictions are off, by cause."""
    off = [name for name, row in rows.items() if any(abs(prediction_error(run) or 0) > _WRONG for run in row["runs"].values())]
    named = {cause: [name for name in names if name in off] for cause, names in _OFF.items()}
    rest = [name for name in off if not any(name in names for names in named.values())]
    return [f"- {cause}: {', '.join(names)}" for cause, names in (named | {"not known": rest}).items() if names]


def page(results: dict[str, Any]) -> str:
    """docs/loops.md"""
    rows = results["loops"]
    lines = [
        "# Loops as people write them",
        "",
        f"Generated by `python -m benchmarks loops --json {FILE.relative_to(ROOT)} --table docs/loops.md`; do "
        f"not edit. torch {results['torch']}, CPU, one thread.",
        "",
        "Each loop trains plainly, and then within three budgets: the plain run's true peak (100 %), the bytes held between "
        "its steps (*resident*) plus half of what a step adds, and the smallest plan (`min`). Where the three differ, a cell "
        "has all of them in this order.",
        "A step begins with its first forward and ends with its update. What comes between two steps (a test, a copy of the "
        "weights, the next batch) is not part of them: where it is above the budget, a line must say so.",
        "*Exact*: losses, parameters, buffers, averages, optimizer state and the generators of torch, numpy and Python are the "
        "plain run's bit by bit. *Kept*: the peak of every step in which a plan was in force is within the budget (`min`: "
        "within the number that it reports), by a count of torch's allocator that is not part of this package (preloaded "
        "around `c10::alloc_cpu`). A step larger than every earlier one cannot be predicted. It is not counted as a fault "
        "if a line reports it and later steps stay within the budget (`min`: within the next number that it reports). "
        "*Observed / plain*: the peak of an observed step by that of the same step of the plain run, the largest of them; "
        f"above {OBSERVED_SHARE} and above the budget it is a fault. *Refusals*: how "
        "often a budget was refused; the run was repeated within the number that was named. "
        "Bytes are in KiB; seconds of solving are those of a shared machine.",
        "",
        summary(rows) + ".",
        "",
        f"Predictions are off by more than {_WRONG:.0%} for these reasons:",
        "",
        *_reasons(rows),
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
        *("| " + " | ".join(cell.replace("|", "/") for cell in cells(name, row)) + " |" for name, row in rows.items()),
        "",
        "| loop | what it is |",
        "|---|---|",
        *(f"| {name} | {LOOPS[name].title} |" for name in rows),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts; all of them where none is given")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--table", type=Path, help="where the page is written")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--moving", action="store_true", help="park all that can be parked, by the smallest plan")
    parser.add_argument("--list", action="store_true", help="say what scripts there are")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return
    if options.list:
        print("\n".join(f"{name:24} {script.title}" for name, script in LOOPS.items()))
        return
    if unknown := [name for name in options.names if name not in LOOPS]:
        parser.error(f"no such script: {', '.join(unknown)}; --list says which there are")
    if options.moving and options.table is not None:
        parser.error("the page is of runs without --moving")
    rows: dict[str, Row] = {}
    if options.json is not None and options.names and options.json.exists():  # the other scripts' rows stay
        rows = json.loads(options.json.read_text())["loops"]
    results: dict[str, Any] = {"torch": version("torch").partition("+")[0], "loops": rows}
    turns = threading.Lock()

    def done(name: str, row: Row) -> None:
        with turns:
            print(line_of(name, row), flush=True)
            rows[name] = brief(row) if options.moving else row
            results["loops"] = {name: rows[name] for name in LOOPS if name in rows}
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")

    measure(options.names or list(LOOPS), options.jobs, done, options.moving)
    if options.table is not None:
        options.table.write_text(page(results))
    print(summary(results["loops"]))


if __name__ == "__main__":
    main()
