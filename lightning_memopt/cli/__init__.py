"""The command line `memopt`: demo, plan, fit, profile, explain, report, breakdown, bench, chain, place, build.

Exit codes: 0 done, 1 a demo whose losses differ, or a bench whose unmodified step fails, 2 bad input, 3 no plan fits the
budget, or no placement the capacity, 130 an interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.bench import command as bench_command
from lightning_memopt.cli import building, fitting, planning, profiling
from lightning_memopt.cli.arguments import ending, nbytes_of, seconds_of
from lightning_memopt.errors import ChainError, ConfigError, InfeasibleError, MemOptError


def _example(name: str) -> Any:
    """A module of examples/. In an installed wheel, that folder is inside the package; in a clone, it is next to the
    package.
    """
    package = Path(__file__).parents[1]
    if (package / "examples").is_dir():
        return importlib.import_module(f"lightning_memopt.examples.{name}")
    sys.path.insert(0, str(package.parent))
    return importlib.import_module(f"examples.{name}")


def _demo(args: argparse.Namespace) -> int:
    outcomes = _example("demo").run(Path(args.folder), quick=args.quick)
    return 0 if all(outcome.losses_identical for outcome in outcomes) else 1


def _explain(args: argparse.Namespace) -> int:
    from lightning_memopt.plan import read_plan, step_of
    from lightning_memopt.report import breakdown, explain

    plan, graph = read_plan(args.plan)
    if args.op or args.module or args.tensors:
        if args.tensors:
            print(explain.tensors(plan, graph))
        for name in args.op:
            print(explain.of_operator(plan, graph, name))
        for name in args.module:
            print(explain.of_module(plan, graph, name))
        return 0
    print(explain.explain(plan, graph))
    print(breakdown.line(breakdown.at_peak(step_of(graph, plan), plan.lives)), flush=True)
    if args.seconds > 0:
        from lightning_memopt.report.helps import helps

        print(helps(plan, graph, args.seconds))
    return 0


def _report(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from lightning_memopt.report.frontier import rows
    from lightning_memopt.report.page import write_page
    from lightning_memopt.report.record import read_record
    from lightning_memopt.report.run import check_target
    from lightning_memopt.solvers import planner

    target = check_target(args.output)
    record = read_record(args.source)
    if record.phase == "file" and record.graph is not None and args.solver_seconds > 0:
        frontier = planner.solve(record.graph, limit_seconds=args.solver_seconds)
        record = replace(record, frontier=tuple(rows(frontier)))
    try:
        write_page(target, record)
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written: {error}; give -o another path") from error
    print(f"{args.output}: {target.stat().st_size} bytes; open it in a browser")
    return 0


def _breakdown(args: argparse.Namespace) -> int:
    from lightning_memopt.plan import read_plan
    from lightning_memopt.report import arena, breakdown
    from lightning_memopt.solvers.recompute.baselines import mirror
    from lightning_memopt.solvers.recompute.echo import echo
    from lightning_memopt.solvers.rollout import keep_all

    if args.png:
        jsonio.check_target(args.png)
    plan, graph = read_plan(args.plan)
    policies = {"unmodified": keep_all(graph), "Mirror": mirror(graph), "Echo": echo(graph), "plan": plan.lives}
    peaks = {name: breakdown.at_peak(graph, lives) for name, lives in policies.items()}
    for axis, kind in ((1, "data structure"), (0, "layer")):
        print(breakdown.compared(peaks, axis, f"In memory at the peak, by {kind}", args.layers))
    saved = {name: breakdown.saved(graph, lives) for name, lives in policies.items()}
    print(breakdown.compared(saved, 1, "What autograd saves, by what the plan does with it"))
    print(breakdown.compared({"all": saved["plan"]}, 0, "What autograd saves, by layer", args.layers))
    print(arena.picture(graph, plan.lives))
    if args.png:
        breakdown.plot(peaks, args.png, args.plan)
        print(f"{args.png}: stacked bars of the tables")
    return 0


def _bench(args: argparse.Namespace) -> int:
    return bench_command.run(args)


def _chain(args: argparse.Namespace) -> int:
    from lightning_memopt.solvers.chain.by_numbers import Status, solve_sequence

    budget = nbytes_of("--budget", args.budget)
    bucket = None if args.bucket is None else nbytes_of("--bucket", args.bucket)
    if args.output:
        jsonio.check_target(args.output)
    data = jsonio.read(args.chain)
    try:
        result = solve_sequence(data, budget, bucket)
    except ChainError as error:
        raise ChainError(f"{args.chain}: {error}") from None
    if result.status is Status.INFEASIBLE:
        raise InfeasibleError(
            f"{args.chain}: no schedule fits {budget} bytes; the smallest budget that does is "
            f"{result.smallest_budget_nbytes} bytes. Use --budget {result.smallest_budget_nbytes}.",
            smallest_nbytes=result.smallest_budget_nbytes,
            budget_nbytes=budget,
        )
    report = {
        "status": result.status.name,
        "total_seconds": result.total_seconds,
        "peak_nbytes": result.peak_nbytes,
        "budget_nbytes": budget,
        "bucket_nbytes": result.bucket_nbytes,
        "solve_seconds": result.solve_seconds,
        "smallest_budget_nbytes": result.smallest_budget_nbytes,
    }
    if args.output:
        jsonio.write(
            args.output,
            {
                "format": "lightning_memopt.chain_plan",
                "schema": 1,
                **report,
                "operations": [list(op) for op in result.operations],
            },
        )
    print(json.dumps(report))
    return 0


def _place(args: argparse.Namespace) -> int:
    from lightning_memopt.buffer_files import check_target, read_buffers, write_placed
    from lightning_memopt.solvers.placement import place, search

    capacity = None if args.capacity is None else nbytes_of("--capacity", args.capacity)
    buffers = read_buffers(args.buffers)
    check_target(args.output)
    if not search.available():
        print("memopt: there is no search, only repeated best-fit. Install a C++ compiler for the search", file=sys.stderr)
    placement = place(buffers, capacity, args.seconds)
    height, bound = placement.height_nbytes, placement.bound_nbytes
    if capacity is not None and height > capacity:
        longer = "" if capacity < bound else ", or more --seconds"
        raise InfeasibleError(
            f"{args.buffers}: no placement within {capacity} bytes after {placement.seconds:.1f} seconds. {bound} bytes are "
            f"live at one moment. The best height reached is {height}: use --capacity {height}{longer}.",
            smallest_nbytes=height,
            budget_nbytes=capacity,
        )
    write_placed(args.output, buffers, placement.offsets)
    print(
        f"{args.output}: {len(buffers)} buffers in {height} bytes, {100 * placement.fragmentation:.4f} % above the "
        f"{bound} bytes that are live at one moment, in {placement.seconds:.1f} seconds"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(prog="memopt", description="Keep PyTorch training within a memory budget.")
    commands = top.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train two real models within a budget (needs lightning and scikit-learn)")
    demo.add_argument("--folder", default="demo", help="folder for summary.json and plan.json (default: demo)")
    demo.add_argument("--quick", action="store_true", help="a few steps only")
    demo.set_defaults(run=_demo)
    plan = commands.add_parser("plan", help="solve a plan for a model, or for the recorded step of a plan file")
    plan.add_argument(
        "source",
        help="a plan file (its recorded step is planned again), or package.module:function returning (model, optimizer, step)",
    )
    plan.add_argument("--budget", required=True, help="8GiB, 80%%, bytes, or min")
    plan.add_argument("--device-nbytes", default=None, help="bytes of the device (16GiB), for budgets given as a share")
    plan.add_argument("--objective", choices=["throughput", "flops"], default="throughput", help="what the plan minimises")
    plan.add_argument(
        "--offload",
        default="none",
        help="none, disk, disk:/a/directory, host or auto: where saved tensors may be parked until backward",
    )
    plan.add_argument(
        "--host-budget", default=None, help="the most bytes of the host's memory for what is parked, as for a run"
    )
    plan.add_argument("--disk-budget", default=None, help="the same for files")
    plan.add_argument("--compress", default="none", help="none, lossless, lossy, or a codec's name")
    plan.add_argument("--solver-seconds", type=seconds_of, default=30.0, help="limit of the solvers (default: 30)")
    plan.add_argument("-o", "--output", default=None, help="the plan file (default: plan.json)")
    plan.set_defaults(run=planning.run)
    fitting.add(commands)
    profiling.add(commands)
    explain = commands.add_parser("explain", help="what a plan does with each block of the model, why, and what would help")
    explain.add_argument("plan")
    explain.add_argument("--tensors", action="store_true", help="one row for each saved tensor, with its points in the step")
    explain.add_argument("--op", action="append", default=[], metavar="NAME", help="what it does with one operator: gelu")
    explain.add_argument("--module", action="append", default=[], metavar="NAME", help="with one module: h.3, or h.*.mlp")
    explain.add_argument(
        "--seconds",
        type=seconds_of,
        default=10.0,
        help="time limit of the search for what would help most (default: 10; 0: no search)",
    )
    explain.set_defaults(run=_explain)
    report = commands.add_parser("report", help="a page with pictures and tables, from the record of a run or from a plan file")
    report.add_argument("source", help="the record of a run, which report= writes next to its page (run.json), or a plan file")
    page = Path("report.html")
    report.add_argument("-o", "--output", type=ending(".html"), default=page, help=f"the page (default: {page})")
    report.add_argument(
        "--solver-seconds", type=seconds_of, default=10.0, help="for a plan file: time limit for other plans; 0: no search"
    )
    report.set_defaults(run=_report)
    breakdown = commands.add_parser(
        "breakdown", help="bytes in memory at a plan's peak, by layer and by data structure, compared with simpler policies"
    )
    breakdown.add_argument("plan")
    breakdown.add_argument("--layers", type=int, default=12, help="rows for the largest layers (default: 12)")
    breakdown.add_argument("--png", type=ending(".png"), help="stacked bars as a picture (needs matplotlib)")
    breakdown.set_defaults(run=_breakdown)
    bench = commands.add_parser("bench", help="measure a model under every method that saves memory, side by side")
    bench_command.add_arguments(bench)
    bench.set_defaults(run=_bench)
    chain = commands.add_parser("chain", help="optimal checkpointing of a sequence given by numbers")
    chain.add_argument("chain", help='JSON: {"stages": [...]}, see docs/formulation.md')
    chain.add_argument("--budget", required=True, help="bytes, 11GiB, ...: all memory, including the chain's input")
    chain.add_argument("--bucket", default=None, help="granularity of memory, e.g. 1MiB (default: a 512th of the budget)")
    chain.add_argument("-o", "--output", default=None, help="write the schedule here")
    chain.set_defaults(run=_chain)
    place = commands.add_parser("place", help="addresses for buffers with known lifetimes and sizes")
    place.add_argument("buffers", help="CSV: id,lower,upper,size; lifetimes are half-open")
    place.add_argument("--capacity", default=None, help="bytes, 11GiB, ... (default: as few as possible)")
    place.add_argument("--seconds", type=float, default=60.0, help="limit of the search (default: 60)")
    place.add_argument("-o", "--output", default="placed.csv", help="CSV: id,lower,upper,size,offset (default: placed.csv)")
    place.set_defaults(run=_place)
    build = commands.add_parser("build", help="build the parts in C++ now, so that no run has to, or needs a compiler for it")
    build.add_argument("-o", "--output", default=None, help="a folder for copies, which runs find by MEMOPT_LIBRARIES")
    build.set_defaults(run=building.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. An error becomes one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # so that an ASCII output can show tables
    try:
        try:
            return _run(parser().parse_args(argv))
        finally:  # also after `--help`, which ends the process
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `memopt explain plan.json | head`: the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports an error when it flushes
        return 0


def _run(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args))
    except InfeasibleError as error:
        print(f"memopt: {error}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        raise
    except (MemOptError, OSError) as error:
        print(f"memopt: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"memopt: {error}. Install it with: pip install 'lightning-memopt[demo]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resume = "; run the same command again to go on after the last row" if args.command == "bench" else ""
        print(f"memopt: interrupted{resume}", file=sys.stderr)
        return 130
