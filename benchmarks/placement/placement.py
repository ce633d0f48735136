"""Addresses: public instances, perfect packings, and fragmentation of recorded steps: `python -m benchmarks placement [PART]`.

    python -m benchmarks placement                       # instances of full load: 60 s each
    python -m benchmarks placement --families guillotine --counts 100 --seeds 1
    python -m benchmarks placement steps                 # recorded steps and their plans: 5 s each
    python -m benchmarks placement public --folder minimalloc/benchmarks/challenging  # of a clone of google/minimalloc

Writes benchmarks/results/placement.json; rows of what was not run stay.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.paths import RESULTS
from benchmarks.lib.tables import print_table
from benchmarks.placement.instances import perfect
from lightning_memopt import jsonio
from lightning_memopt.buffer_files import read_buffers
from lightning_memopt.solvers.placement import Buffer, best_fit, buffers_of, faults, place
from lightning_memopt.solvers.placement.buffers import Problem

FAMILIES: dict[str, dict[str, object]] = {"guillotine": {}, "pinwheels": {"pinwheels": True}}
STEPS = ("gpt2", "llama", "resnet50", "t5", "bert", "vit")
SHARES = (0.7, 0.4, 0.0)
"""Budgets of plans: how far from the smallest plan to the unmodified step."""
FILE = RESULTS / "placement.json"


def instances(families: list[str], counts: list[int], seeds: int, seconds: float) -> Iterator[dict[str, object]]:
    """Place instances of each family and number of buffers. Every placement is checked."""
    for family in families:
        for count in counts:
            times, fitted, heights = [], 0, [1.0]
            for seed in range(seeds):
                buffers, offsets, capacity = perfect(count, seed, **FAMILIES[family])  # type: ignore[arg-type]
                assert not faults(buffers, offsets, capacity), "the known packing is perfect"
                placement = place(buffers, capacity, seconds)
                assert not faults(buffers, placement.offsets, placement.height_nbytes)
                fitted += placement.fits
                times.append(placement.seconds)
                heights.append(placement.height_nbytes / capacity)
            row = {"family": family, "buffers": count, "placed": fitted, "of": seeds}
            row |= {"median_seconds": round(statistics.median(times), 2), "worst_height": round(max(heights), 3)}
            yield row


def steps(names: list[str], shares: list[float], seconds: float) -> Iterator[dict[str, object]]:
    """Place the buffers of real steps, and of plans for them; fragmentation in per cent."""
    for label, buffers in _recorded(names, shares):
        problem = Problem.of(buffers, alignment=64)
        placement = place(buffers, seconds=seconds, alignment=64)
        assert not faults(buffers, placement.offsets, placement.height_nbytes, 64)
        best_fitted = min(problem.height_nbytes(best_fit.best_fit(problem, o)) for o in best_fit.orders(problem).values())
        row: dict[str, object] = {
            "step": label,
            "buffers": len(buffers),
            "max_live_MiB": round(placement.bound_nbytes / 2**20, 2),
        }
        row["best_fit"] = round(100 * (best_fitted / placement.bound_nbytes - 1), 3)
        row |= {"placed": round(100 * placement.fragmentation, 4), "seconds": round(placement.seconds, 2)}
        yield row


def public(folder: Path, seconds: float) -> Iterator[dict[str, object]]:
    """Place the instances of a folder: files NAME.CAPACITY.csv, as MiniMalloc has them."""
    for file in sorted(folder.glob("*.csv")):
        capacity = int(file.name.split(".")[1])
        buffers = read_buffers(file)
        placement = place(buffers, capacity, seconds)
        assert not faults(buffers, placement.offsets, placement.height_nbytes)
        row: dict[str, object] = {"instance": file.name.split(".")[0], "buffers": len(buffers), "placed": placement.fits}
        row |= {"height": round(placement.height_nbytes / capacity, 3), "seconds": round(placement.seconds, 2)}
        yield row


def _recorded(names: list[str], shares: list[float]) -> Iterator[tuple[str, list[Buffer]]]:
    from benchmarks.lib.bench import Bench
    from lightning_memopt.solvers import planner

    for name in names:
        graph = Bench(name).observe()
        yield name, buffers_of(graph)
        frontier = planner.solve(graph, limit_seconds=10)
        least, most = frontier.smallest_nbytes, frontier.plan(1 << 62).unmodified_peak_nbytes
        for share in shares:
            plan = frontier.plan(int(least + share * (most - least)))
            yield f"{name}, {share:.0%}", buffers_of(graph, plan.lives)


def _key(row: dict[str, object]) -> tuple[object, object]:
    return (row["family"], row["buffers"]) if "family" in row else (row.get("step") or row["instance"], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["instances", "steps", "public"], default="instances")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--counts", nargs="+", type=int, default=[100, 250])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="budgets of plans; see SHARES")
    parser.add_argument("--seconds", type=float, default=None, help="for each placement (60; steps: 5)")
    parser.add_argument("--folder", type=Path, default=None, help="of the public instances")
    args = parser.parse_args()
    if args.part == "public":
        if args.folder is None:
            parser.error("public needs --folder")
        produced = public(args.folder, args.seconds or 60.0)
    elif args.part == "steps":
        produced = steps(args.models, args.shares, args.seconds or 5.0)
    else:
        produced = instances(args.families, args.counts, args.seeds, args.seconds or 60.0)
    before = jsonio.read(FILE) if FILE.exists() else {}
    rows: list[dict[str, object]] = []
    for row in produced:
        print(row, flush=True)
        rows.append(row)  # written at once: what was measured stays, if the rest is interrupted
        stay = [old for old in before.get(args.part, []) if all(_key(old) != _key(new) for new in rows)]
        jsonio.write(FILE, {**before, args.part: [*stay, *rows]}, indent=1)
    print_table(rows)


if __name__ == "__main__":
    main()
