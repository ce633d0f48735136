"""Every front trains five models plainly and within a budget: the same bits, the budget kept, the peak as predicted?

    python -m benchmarks fronts [--fronts NAME...] [--models NAME...] [--json FILE] [--table FILE]
    python -m benchmarks fronts --missing --json FILE       # only the cases that the file has not

A front is the way in which users come to this package: a plain loop, Accelerate, Fabric (front_loops.py), transformers'
Trainer, Lightning's Trainer (front_trainers.py). Each trains five models (front_models.py) for 20 steps in fp32 and bf16:
plainly, with accumulation, clipping, a schedule, an average of the weights, and resumed from a checkpoint (of the plain run;
and by the plain run). A solve has 0.3 seconds, because bits and peaks are compared, not speed. The budget is
what is there between the steps of the plain run and half of what a step has on top; where that is refused, the number that the
refusal names. Losses, parameters, buffers, averages, optimizer state and generators must be the plain run's bit by bit, the
peak of every planned step within the budget and within 1 % of the prediction, by a count of torch's allocator that is not part
of the package. --json adds to what the file has of other fronts; --table writes the page from it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.robustness import front_loops, front_trainers
from benchmarks.robustness.front_case import PRECISIONS, VARIANTS, Case, Front
from benchmarks.robustness.front_models import MODELS, NEEDS, built
from benchmarks.robustness.loops_judge import sizes, within
from benchmarks.robustness.scripts import Log, Script, Watch
from benchmarks.robustness.worker import ask

FILE = RESULTS / "fronts.json"
NEAR = 0.01
"""A prediction is right where the largest peak of a planned step is off by no more than this share of it."""
FRONTS: dict[str, Front] = {
    "plain": front_loops.plain,
    "accelerate": front_loops.accelerate,
    "fabric": front_loops.fabric,
    "transformers": front_trainers.transformers,
    "lightning": front_trainers.lightning,
}
FRONT_NEEDS = {
    "accelerate": ("accelerate.accelerator",),
    "fabric": ("lightning.fabric",),
    "transformers": ("accelerate.accelerator", "transformers.trainer"),
    "lightning": ("lightning.pytorch",),
}
"""Modules that a front needs beside torch and the model's."""
TIMEOUT_SECONDS = 1800.0
"""For the runs of a case. A run that does not end is ended before (loops_run.py)."""
_LEFT_OUT = ("peaks", "said", "noise", "report", "solve_seconds", "measured_by_session", "between")
"""Entries of a row that no reader of the file needs."""
Row = dict[str, Any]


def script_of(front: str, case: Case) -> Script:
    """The case as a script, which `loops_run` can run."""

    def train(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
        return FRONTS[front](case, watch, log)

    name = f"{front}/{case.model}/{case.precision}/{case.variant}"
    needs = (*NEEDS.get(case.model, ("transformers",)), *FRONT_NEEDS.get(front, ()))
    return Script(name, name, train, needs, case.steps, {"solver_seconds": 0.3})


def examined(script: Script) -> Row:
    """A case, trained plainly and within half of what a step has on top of what is resident."""
    from benchmarks.robustness.loops_run import forked

    run = partial(forked, script)
    plain = run(None)
    if plain["status"] != "trained":
        return {"faults": ["does not train plainly"], "error": plain["error"], "traceback": plain.get("traceback")}
    counted = sizes(plain)
    if counted is None:
        return {"faults": ["not counted"], "error": "no compiler: nothing counts the allocator's bytes"}
    peak, resident = counted
    row = within(run, plain, resident + (peak - resident) // 2)
    row |= {"peak": peak, "resident": resident, "off": None, "seconds_plain": round(plain["seconds"], 2)}
    if row.get("predicted") is not None:
        row["off"] = abs(row["measured"] / row["predicted"] - 1)
        if row["off"] > NEAR:
            row["faults"].append("prediction off")
    elif "error" not in row:
        row["faults"].append("no plan")
    return {key: value for key, value in row.items() if key not in _LEFT_OUT}


def missing(script: Script) -> str | None:
    """The package that a case needs and that is not installed."""
    packages = [need.partition(".")[0] for need in script.needs]
    return next((package for package in packages if importlib.util.find_spec(package) is None), None)


def work() -> None:
    """Read cases, answer each with a line of JSON. What they import is imported before they fork: once, not in every run."""
    for line in sys.stdin:
        front, model, precision, variant = line.strip().split("/")
        script = script_of(front, Case(model, precision, variant))
        for need in script.needs:
            importlib.import_module(need)
        built(model)
        print(json.dumps(examined(script)), flush=True)


# -- what is printed and written --------------------------------------------------------------------------


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:,.1f}"


def line_of(name: str, row: Row) -> str:
    if "budgets" not in row or row.get("predicted") is None:
        return f"{name:48} {', '.join(row['faults'])} {row.get('error', '')[:200]}"
    verdict = ", ".join(row["faults"]) or "ok"
    return (
        f"{name:48} {verdict}; {_kib(row['peak'])} -> {_kib(row['measured'])} KiB of {_kib(row['budgets'][-1])}, "
        f"prediction off by {100 * row['off']:.3f} %; {row['seconds_plain']} s and {row['seconds']} s"
    )


def summary(rows: dict[str, Row]) -> str:
    faults = [fault for row in rows.values() for fault in row["faults"]]
    counts = ", ".join(f"{faults.count(fault)} {fault}" for fault in sorted(set(faults))) or "no fault"
    return f"{len(rows)} cases: {counts}"


def page(results: dict[str, Any]) -> str:
    """docs/measurements/fronts.md"""
    rows: dict[str, Row] = results["cases"]
    total = len(FRONTS) * len(MODELS) * len(PRECISIONS) * len(VARIANTS)
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Fronts",
        "",
        f"Generated by `python -m benchmarks fronts --json {FILE.relative_to(ROOT)} --table docs/measurements/fronts.md`; do "
        f"not edit. {versions}; CPU, one thread.",
        "",
        "Every front trains five tiny models for 20 steps in fp32 and bf16: plainly, with accumulation, clipping, a schedule, "
        "an average of the weights, resumed from the checkpoint of the plain run, and resumed by the plain run. The budget is "
        "the bytes held between the steps of the plain run, plus half of what a step adds.",
        "*Exact*: losses, parameters, buffers, averages, optimizer state and generators are the plain run's bits. *Kept*: "
        "the peak of every planned step is within the budget, by a count of torch's allocator that is not in this package. "
        "*Off*: by how much the largest peak of a planned step differs from its prediction. *Peak*: planned, as a share of the "
        "plain run's. A row has the cases of one front in one precision.",
        "",
        f"{summary(rows)}." + (f" There are {total}; the others were not run." if total > len(rows) else ""),
        "",
        "| front | precision | cases | exact | kept | off, at most | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for front, precision in product(FRONTS, PRECISIONS):
        cases = [row for name, row in rows.items() if fnmatch(name, f"{front}/*/{precision}/*")]
        if cases:
            ran = [row for row in cases if row.get("predicted") is not None]
            exact, kept = sum(row["exact"] for row in ran), sum(row["over"] <= 0 for row in ran)
            off = f"{100 * max(row['off'] for row in ran):.2f} %" if ran else "-"
            shares = [100 * row["measured"] / row["peak"] for row in ran] or [0.0]
            peak = f"{min(shares):.0f} to {max(shares):.0f} %"
            lines.append(f"| {front} | {precision} | {len(cases)} | {exact} | {kept} | {off} | {peak} |")
    faulty = {name: row for name, row in rows.items() if row["faults"]}
    if faulty:
        lines += ["", "| case | fault |", "|---|---|"]
        lines += [f"| {name} | {', '.join(row['faults'])} {row.get('error', '')[:120]} |" for name, row in faulty.items()]
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("torch", "transformers", "accelerate", "peft", "lightning"):
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            pass
    return versions


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", nargs="*", default=list(FRONTS), choices=list(FRONTS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--missing", action="store_true", help="run only the cases that the file of --json has not")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--table", type=Path, help="where the page is written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return
    rows: dict[str, Row] = {}
    if options.json is not None and options.json.exists():  # the rows of cases that are not run now stay
        rows = json.loads(options.json.read_text())["cases"]

    def done(name: str, row: Row) -> None:
        rows[name] = row if "faults" in row else {"faults": [f"{row['status']}: {row['note']}"]}
        print(line_of(name, rows[name]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"versions": _versions(), "cases": rows}, indent=1) + "\n")

    names = []
    for front, model, precision, variant in product(options.fronts, options.models, options.precisions, options.variants):
        script = script_of(front, Case(model, precision, variant))
        if options.missing and script.name in rows:
            continue
        if (package := missing(script)) is not None:
            print(f"{script.name:48} not run: {package} is not installed")
        else:
            names.append(script.name)
    ask("benchmarks.robustness.fronts", names, 1, done, TIMEOUT_SECONDS)
    if options.table is not None:
        options.table.write_text(page({"versions": _versions(), "cases": rows}))
    print(summary(rows))


if __name__ == "__main__":
    main()
