"""What freed memory buys on a card that is not here, predicted: batch and samples/s at equal budget (Echo, ISCA 2020, VI).

    python -m benchmarks throughput [--traces DIR] [--only NAME,NAME] [--card] [--profile NAME]

Echo's four models at its widths and depths (`throughput_models`): real steps recorded on this CPU at two small batch sizes, all
others fitted, every op priced at that size by the roofline of the profile's card (`priced`). Not one second is measured.
For every model: the largest batch that the unmodified step holds within the budget; with recomputation planned, with Echo's
plan alone, and with the host's memory and lossless codecs beside recomputation (`throughput_away`), the batch with the most
samples per second, twice the unmodified batch, and the largest; the first of these again under other assumptions about launches
and the link, for they decide. Energy is the board's power for as long as the step takes: its ratio is the inverse of that of
throughput. The same traces give the same numbers: the planners have no time limit here.
Writes benchmarks/results/throughput.json, model by model.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batch.throughput_away import Assumed, HostPlans
from benchmarks.lib.paths import RESULTS
from benchmarks.lib.priced import Price, PricedFit, priced, recorded
from benchmarks.lib.tables import print_table
from benchmarks.papers.transfer_papers import EFFICIENCY
from lightning_memopt.batching.plans import largest
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, Rebuild, lower, simulate
from lightning_memopt.plan.rates import MachineRates, profile
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import keep_all

FILE = RESULTS / "throughput.json"
PROFILE = "pcie3-11gb"
HOST = "ours, with host memory"
WATTS = 250.0
"""Of the board: its thermal design power, as Echo VI-B quotes the vendor."""
RECORDER_SECONDS = 28e-6
"""Of the host, for each forward op that is recorded and dropped, by the Python engine; the native one takes 6.3e-6
(benchmarks/results/overhead.json)."""
MOST = 1 << 14
_PLANS = 48
"""Plans of a frontier that are priced at other sizes."""
_ROUNDS = 2
_RANGE = 32
"""No plan holds more times the unmodified batch."""
_SIZES = 48
"""Batch sizes that are priced, from a quarter of the unmodified one on."""


@dataclass(frozen=True, eq=False)
class Pooled:
    """A plan: how often it runs each op again, and the largest batch that it holds."""

    solver: str
    lives: tuple[Life, ...]
    again: Any
    most: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy at one batch size. Of the unmodified step there: `extra_percent` of its seconds for what runs again, and
    `waits_percent` for copies that it waits for and for codecs. `host_bytes`: the most that is in the host's memory."""

    policy: str
    batch: int
    peak_bytes: int
    samples_per_second: float
    extra_percent: float
    solver: str
    waits_percent: float = 0.0
    moved_bytes: int = 0
    host_bytes: int = 0

    def json(self, base: Row) -> dict[str, Any]:
        return self.__dict__ | {
            "batch_multiple": self.batch / base.batch,
            "throughput_ratio": self.samples_per_second / base.samples_per_second,
            "joules_per_sample": WATTS / self.samples_per_second,
            "energy_ratio": base.samples_per_second / self.samples_per_second,
        }


@dataclass(eq=False)
class Model:
    """One fitted step within one budget."""

    fit: PricedFit
    budget_nbytes: int
    _seconds: dict[tuple[Price, int], Any] = field(default_factory=dict)

    def unmodified(self) -> int:
        return largest(cache(lambda size: unmodified_peak(self.fit.at(size))), self.budget_nbytes, 1, MOST)

    def seconds(self, price: Price, size: int) -> Any:
        """Of every op at this size."""
        key = price, size
        if key not in self._seconds:
            self._seconds[key] = np.array(self.fit.priced(price, size))
        return self._seconds[key]

    def pooled(self, solver: str, lives: tuple[Life, ...], low: int, high: int) -> Pooled | None:
        """A plan, and how far it goes between two sizes. The bytes at every point are on a line between them, or below it."""
        try:
            one = simulate(self.fit.at(low), lives)
            schedule = lower(self.fit.at(low), lives)
        except LoweringError:
            return None
        other = simulate(self.fit.at(high), lives, schedule)
        a, b = np.array(one.nbytes, dtype=float), np.array(other.nbytes, dtype=float)
        room = self.budget_nbytes - (planner.UNSEEN_NBYTES if schedule.rebuilt else 0)
        grow = (b - a) / (high - low)
        until = np.where(grow > 0, low + (room - a) / np.where(grow > 0, grow, 1.0), np.where(a > room, 0.0, high))
        most = min(high, math.floor(float(until.min()) + 1e-9))
        ran = [s.op for steps in schedule.segments.values() for s in steps if isinstance(s, Rebuild)]
        again = np.bincount(np.array(ran, dtype=int), minlength=len(self.fit.small.ops))
        return Pooled(solver, lives, again, most)

    def pool(self, solve: Callable[[Graph], Iterable[tuple[str, tuple[Life, ...]]]], bare: int) -> list[Pooled]:
        """Plans solved at the size beyond the unmodified one, then where those lead."""
        found: list[Pooled] = []
        size, high = bare + 1, _RANGE * bare
        for _ in range(_ROUNDS):
            plans = (self.pooled(solver, lives, bare, high) for solver, lives in solve(self.fit.at(size)))
            found += [p for p in plans if p is not None]
            most = max(p.most for p in found)
            if most >= high:
                raise RuntimeError(f"a plan holds a batch of {high}: widen the range")
            if most <= size:
                break
            size = most
        return found

    def rate(self, plan: Pooled, size: int, price: Price, recorder_seconds: float = 0.0) -> tuple[float, float]:
        """Samples a second, and seconds again as a share of the unmodified step."""
        took = self.seconds(price, size)
        base = float(took.sum())
        extra = float(took @ plan.again)
        seconds = base + extra
        if recorder_seconds and plan.again.any():
            kernels = int(np.count_nonzero(took)) + int(plan.again @ (took > 0))
            host = kernels * price.launch_seconds + recorder_seconds * len(self.fit.small.forward)
            seconds = max(seconds, host)
        return size / seconds, extra / base

    def row(self, policy: str, plan: Pooled, size: int, price: Price) -> Row:
        """Simulated at this size itself. Raises RuntimeError where it is above the budget after all."""
        peak = simulate(self.fit.at(size), plan.lives).predicted.peak_nbytes
        if peak > self.budget_nbytes:
            raise RuntimeError(f"{policy} at a batch of {size} takes {peak} of {self.budget_nbytes} bytes")
        rate, extra = self.rate(plan, size, price)
        return Row(
            policy=policy, batch=size, peak_bytes=peak, samples_per_second=rate, extra_percent=100 * extra, solver=plan.solver
        )

    def fastest(self, pool: list[Pooled], sizes: Iterable[int], price: Price, recorder: float = 0.0) -> tuple[Pooled, int]:
        """The plan and the size, of these, with the most samples a second."""
        options = [(p, size) for size in sizes for p in pool if p.most >= size]
        return max(options, key=lambda o: (self.rate(*o, price, recorder)[0], -o[1]))


def _grid(bare: int, most: int) -> list[int]:
    """Sizes to look at: the unmodified step's, and between one quarter of it and the largest, about evenly spaced by ratio."""
    least = max(1, bare // 4)
    ratio = (most / least) ** (1 / (_SIZES - 1))
    return sorted({bare, *(round(least * ratio**i) for i in range(_SIZES))})


def ours(graph: Graph) -> list[tuple[str, tuple[Life, ...]]]:
    """Plans of the frontier, fewest bytes first, thinned."""
    frontier = planner.solve(graph, limit_seconds=math.inf)
    found = [(c.solver, c.lives) for c in frontier.candidates]
    return [*found[:: max(1, -(-len(found) // _PLANS))], found[-1]]


def echo_alone(graph: Graph) -> list[tuple[str, tuple[Life, ...]]]:
    return [("Echo", echo(graph)), ("keep all", keep_all(graph))]


def assumptions(price: Price) -> dict[str, Assumed]:
    """Other prices, by what they assume."""

    def other(**changed: Any) -> Assumed:
        return Assumed(price=replace(price, **changed))

    return {
        "as the profile": Assumed(price=price),
        "launch 2.5 us": other(launch_seconds=2.5e-6),
        "launch 10 us": other(launch_seconds=10e-6),
        "launches hidden": other(hidden=True),
        "gradients accumulate for free": other(adds_free=True),
        "gradients for free, launches hidden": other(hidden=True, adds_free=True),
        "our recorder's host time": Assumed(price=price, recorder_seconds=RECORDER_SECONDS),
        "half the link": Assumed(price=price, link=0.5),
    }


def with_host(model: Model, plans: HostPlans, bare: int, alone: tuple[int, int]) -> list[Row]:
    """Rows with plans that put tensors away. `alone`: the fastest and the largest batch with recomputation alone."""
    most = plans.largest(alone[1], _RANGE * bare)
    twice = [2 * bare] if most >= 2 * bare else []
    sizes = {"fastest": plans.fastest([alone[0], *twice], bare, most)}
    sizes |= dict.fromkeys(("twice the batch",) if twice else (), 2 * bare) | {"largest": most}
    found = []
    for which, size in sizes.items():
        predicted, step = plans.predicted(size), model.fit.at(size).step_seconds
        if predicted.peak_nbytes > model.budget_nbytes:
            raise RuntimeError(f"{HOST} at {size} takes {predicted.peak_nbytes} of {model.budget_nbytes} bytes")
        found.append(
            Row(
                policy=f"{HOST}, {which}",
                batch=size,
                peak_bytes=predicted.peak_nbytes,
                samples_per_second=size / (step + predicted.seconds),
                extra_percent=100 * predicted.extra_seconds / step,
                solver=plans.plan(size).solver,
                waits_percent=100 * (predicted.stall_seconds + predicted.codec_seconds) / step,
                moved_bytes=predicted.moved_nbytes,
                host_bytes=predicted.tier_nbytes,
            )
        )
    return found


def predicted(name: str, traces: Path | None, rates: MachineRates, card: bool = False) -> dict[str, Any]:
    """Every row of one model, within its own budget or, `card`, all of the card's."""
    from benchmarks.models.full_size import SETUPS, observe  # transformers

    setup, device = SETUPS[name], rates.device
    assert device is not None
    price = Price.of(device, EFFICIENCY)
    fit = priced(recorded(partial(observe, setup), name, setup.sizes, traces), setup.sizes, price)
    whole = Model(fit, device.nbytes)
    own = None if card else setup.batch
    budget = device.nbytes if own is None else min(device.nbytes, unmodified_peak(fit.at(own)))
    model = Model(fit, budget)
    bare = model.unmodified()
    plain = Pooled("keep all", keep_all(fit.at(bare)), np.zeros(len(fit.small.ops)), bare)
    base = model.row("unmodified", plain, bare, price)
    print(f"{setup.title}: {len(fit.small.ops)} ops, {budget} bytes, unmodified {bare}", flush=True)
    pools = {"Echo": model.pool(echo_alone, bare), "ours": model.pool(ours, bare)}
    rows, sizes = [base], {}
    for policy, pool in pools.items():
        most = max(p.most for p in pool)
        sizes[policy] = _grid(bare, most)
        rows.append(model.row(f"{policy}, fastest", *model.fastest(pool, sizes[policy], price), price))
        if most >= 2 * bare:
            rows.append(model.row(f"{policy}, twice the batch", *model.fastest(pool, [2 * bare], price), price))
        rows.append(model.row(f"{policy}, largest", *model.fastest(pool, [most], price), price))
    alone = next(row.batch for row in rows if row.policy == "ours, fastest"), rows[-1].batch
    host = HostPlans(fit, budget, rates, [(p.solver, p.lives) for p in pools["ours"]])
    rows += with_host(model, host, bare, alone)
    fastest = next(row.batch for row in rows if row.policy == f"{HOST}, fastest")
    found = []
    for label, assumed in assumptions(price).items():
        other, recorder = assumed.price, assumed.recorder_seconds
        before = model.rate(plain, bare, other)[0]
        line: dict[str, Any] = {"assumption": label, "unmodified_samples_per_second": before}
        for policy, pool in pools.items():
            plan, size = model.fastest(pool, sizes[policy], other, recorder)
            line[policy] = {"batch": size, "throughput_ratio": model.rate(plan, size, other, recorder)[0] / before}
        size, samples = host.best(assumed, fastest)
        away = {"batch": size, "throughput_ratio": samples / before}
        line[HOST] = max(away, line["ours"], key=lambda one: one["throughput_ratio"])  # planned at that price, it is no slower
        found.append(line)
    took = model.seconds(price, bare)
    kernels = int(np.count_nonzero(took))
    shown = sorted({*(s for s in (8, 16, 24, 32, 64, 128, 256) if s <= 2 * bare), bare})
    return {
        "title": setup.title,
        "below_the_paper": setup.below,
        "ops": len(fit.small.ops),
        "kernels": kernels,
        "budget_bytes": budget,
        "budget_is": "the card" if budget == device.nbytes else f"what the unmodified step takes at batch {setup.batch}",
        "unmodified_batch_on_the_card": whole.unmodified(),
        "launch_share": kernels * device.launch_seconds / float(took.sum()),
        "share_that_does_not_grow": float(model.seconds(price, 1).sum()) / float(took.sum()),
        "unmodified_samples_per_second": {s: model.rate(plain, s, price)[0] for s in shown},
        "rows": [row.json(base) for row in rows],
        "assumptions": found,
    }


def show(results: dict[str, Any]) -> None:
    for found in results["models"].values():
        print(f"\n{found['title']}: predicted, {found['budget_bytes'] / 2**30:.2f} GiB ({found['budget_is']})")
        print_table(
            [
                {
                    "policy": r["policy"],
                    "batch": r["batch"],
                    "multiple": f"x{r['batch_multiple']:.2f}",
                    "samples/s": f"{r['samples_per_second']:.1f}",
                    "ratio": f"x{r['throughput_ratio']:.3f}",
                    "again": f"{r['extra_percent']:.1f} %",
                    "waits": f"{r.get('waits_percent', 0.0):.1f} %",
                    "in the host": f"{r.get('host_bytes', 0) / 2**30:.2f} GiB",
                    "J/sample": f"{r['joules_per_sample']:.3f}",
                    "energy": f"{100 * r['energy_ratio']:.0f} %",
                    "plan": r["solver"],
                }
                for r in found["rows"]
            ]
        )
        print_table(
            [
                {"assumed": a["assumption"], "unmodified/s": f"{a['unmodified_samples_per_second']:.1f}"}
                | {p: f"{a[p]['batch']}, x{a[p]['throughput_ratio']:.3f}" for p in ("Echo", "ours", HOST) if p in a}
                for a in found["assumptions"]
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=PROFILE, help="the card")
    parser.add_argument("--traces", type=Path, help="where recorded steps are kept between runs")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--card", action="store_true", help="all of the card for every model, in rows of its own")
    args = parser.parse_args()
    rates = profile(args.profile)
    for name in args.only.split(",") if args.only else ("nmt", "nmt_100", "deepspeech2", "transformer", "resnet152"):
        found = predicted(name, args.traces, rates, args.card)
        results = json.loads(FILE.read_text()) if FILE.exists() else {}
        results |= {"predicted": True, "profile": args.profile, "efficiency": EFFICIENCY, "watts": WATTS}
        results.setdefault("models", {})[f"{name}, card" if args.card else name] = found
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    show(json.loads(FILE.read_text()))


if __name__ == "__main__":
    main()
