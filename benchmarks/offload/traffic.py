"""Bytes that a step moves, beside those of fixed policies within the same budget, and a bound that no plan beats.

    python -m benchmarks traffic                # writes results/traffic.json, a model at a time: an hour
    python -m benchmarks traffic gpt2 llama_lora
    python -m benchmarks traffic --table        # what is recorded, as Markdown

The models of `states` with AdamW and two samples a batch, and two of them with adapters, all else frozen. Each is trained
within the smallest budget, and within budgets that are a third and two thirds of the way from there to the peak of the plain
step, with `offload="disk"` and no early updates. What a plan moves is counted while it runs; what fixed policies would move is
computed (fixed.py). Plans are chosen by seconds, not by bytes, so each budget has two: one for the rates of this machine's
disk, as measured once for each model, and one for a link so slow that nothing but bytes moved counts (1 MB/s). `seconds` are
predicted, and extra: those of the copies that a step waits for, and of recomputation.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.lib.bench import MIB
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, built
from benchmarks.offload.fixed import KINDS, Policy, least_moved_nbytes, policies_of
from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Machine
from lightning_memopt.plan.rates import Link, MachineRates
from lightning_memopt.plan.resting import Parked, Rests
from lightning_memopt.session import times
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe import costs
from lightning_memopt.session.times import Times

FILE = RESULTS / "traffic.json"
STEPS, COUNTED = 6, 2
"""The first three are observed. The last ones are counted, when nothing is parked for the first time."""
SHARES = {"smallest": 0.0, "1/3": 1 / 3, "2/3": 2 / 3}
"""Budgets: where between the smallest plan and the plain peak."""
SLOW = MachineRates(name="slow", links={"disk": Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6)})
ADAPTED = {"llama_lora": "llama", "bert_lora": "bert"}
SOLVER_SECONDS = 1.0
"""The time limit of each solver."""
Row = dict[str, Any]


class Linked(Times):
    """A link with these rates; None: with those that are measured first.

    rates: its rates.
    """

    def __init__(self, rates: MachineRates | None = None) -> None:
        self.rates = rates

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        self.rates = self.rates or measure()
        return self.rates


class Adapter(nn.Module):
    """A frozen linear layer with an adapter of rank 8."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(8, frozen.in_features) / 50)
        self.up = nn.Parameter(torch.randn(frozen.out_features, 8) / 50)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + (x @ self.down.T) @ self.up.T
        return result


def model_of(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The model of this name, and a batch of two samples."""
    model, batch = built(ADAPTED.get(name, name), 2)
    if name in ADAPTED:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child.out_features < 1024:  # not the head
                    setattr(module, child_name, Adapter(child))
    return model, batch


def trained(name: str, budget: int | str | None, link: Times) -> tuple[Any, list[int], str]:
    """A training within this budget, without a plan for None: the run's status, the bytes that the counted steps moved, and a
    digest of weights, gradients and state. Raises InfeasibleError as the run does.
    """
    gc.collect()
    model, batch = model_of(name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.manual_seed(1)
    status, counts = None, [0]

    def train(moved: Callable[[], int]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            counts.append(moved())

    if budget is None:
        train(lambda: 0)
    else:
        options: dict[str, Any] = {"offload": "disk", "optimizer_in_backward": "never"}
        options |= {"solver_seconds": SOLVER_SECONDS, "verbose": False}
        with (
            mock.patch.object(times, "current", link),
            optimize(model, optimizer, budget=budget, max_slowdown=math.inf, **options) as run,
        ):
            train(lambda: moved_nbytes(run.session))
            status = run.status()
    digest = hashlib.sha256()
    for p in model.parameters():
        for t in (p.detach(), p.grad, *optimizer.state.get(p, {}).values()):
            digest.update(b"" if t is None else t.contiguous().reshape(-1).view(torch.uint8).numpy())
    moved = [now - before for before, now in pairwise(counts)]
    return status, moved[-COUNTED:], digest.hexdigest()


def moved_nbytes(session: Any) -> int:
    """Bytes that steps of a session have moved so far."""
    state = session._plan_cache.main
    depot = state.depot if isinstance(state, Running) else None
    return int(session._at_rest.moved_nbytes + (0 if depot is None else depot.moved_nbytes))


class Watched:
    """A step that a session solved for, and the fixed policies for it."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.once_nbytes = self.rest_nbytes = 0
        self.policies: list[Policy] = []
        self._solved = AtRest.solved

    def solved(self, at_rest: AtRest, solve: Any, limit: int | None, graph: Graph) -> Any:
        found = self._solved(at_rest, solve, limit, graph)
        rests = Rests(tuple(at_rest.states.found(graph)), tuple(at_rest.weights.found(graph)))
        self.graph = graph
        self.once_nbytes = sum(unit.parking.nbytes for unit in rests.units if not unit.parking.are_trained)
        self.rest_nbytes = sum(each.parking.nbytes for each in rests.by_price())
        offloading, known = at_rest.states.offloading, set[frozenset[str]]()
        machine = Machine(overhead=costs.overhead(graph, offloading.device))
        for kind in KINDS:
            taken = [each for each in rests.by_price() if kind.takes(each)]
            key = frozenset(f"{each.parking}" for each in taken)
            if key in known:
                continue  # the model has no frozen weights: this kind parks what another one does
            known.add(key)
            some = rests.only(taken)
            own = Parked.of(graph, some, at_rest.states.chunks(graph, some))
            rates, tier = offloading.rates, offloading.tier
            self.policies += policies_of(kind, own.graph, own.rests.by_price(), rates, tier, SOLVER_SECONDS, machine)
        return found


def row(name: str) -> Row:
    """What is recorded of a model."""
    watched, links = Watched(), {"seconds": Linked(), "bytes": Linked(SLOW)}
    _, _, plain = trained(name, None, links["bytes"])
    with mock.patch.object(AtRest, "solved", lambda *args: watched.solved(*args)):
        status, _, _ = trained(name, "min", links["seconds"])
    assert watched.graph is not None
    smallest, peak = status.plan.budget_nbytes, status.plan.unmodified_peak_nbytes
    found: Row = {"unmodified_nbytes": peak, "rest_nbytes": watched.rest_nbytes, "budgets": {}}
    for label, share in SHARES.items():
        budget = smallest + int(share * (peak - smallest))
        by: Row | None = None
        while by is None:
            try:
                by = {by: planned(name, budget, link, plain) for by, link in links.items()}
            except InfeasibleError as error:  # a run counts on no plan before its first update that takes long to find
                assert error.smallest_nbytes is not None and error.smallest_nbytes > budget
                budget = error.smallest_nbytes
        kept = {each: seconds for each in watched.policies if (seconds := each.seconds(budget)) is not None}
        point: Row = {
            "budget_nbytes": budget,
            "bound_nbytes": least_moved_nbytes(watched.graph, watched.once_nbytes, budget),
            "policies": {each.name: {"moved_nbytes": each.moved_nbytes, "seconds": kept[each]} for each in kept},
            "by": by,
        }
        found["budgets"][label] = point
        print(f"{name}, {label}: {point}", flush=True)
    return found


def planned(name: str, budget: int, link: Linked, plain: str) -> Row:
    """A plan within this budget, for this link. `plain`: the digest of the plain run."""
    status, moved, digest = trained(name, budget, link)
    plan = status.plan
    at_rest = sum(2 * each.nbytes for each in plan.states) + sum(each.moved_nbytes for each in plan.weights)
    return {
        "measured_peak_nbytes": status.measured_peak_nbytes,
        "equal": digest == plain,
        "moved_nbytes": max(moved),
        "moved_alike": min(moved) == max(moved),
        "predicted_nbytes": plan.predicted.moved_nbytes,
        "at_rest_nbytes": at_rest,
        "rebuilt_ops": plan.predicted.rebuilt_ops,
        "seconds": plan.predicted.seconds,
    }


def best(point: Row) -> tuple[str, Row] | None:
    """The fixed policy that moves least within the budget of this row, and what it takes; None if none keeps it."""
    return min(point["policies"].items(), key=lambda each: (each[1]["moved_nbytes"], each[1]["seconds"]), default=None)


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown: MiB, and seconds."""
    columns = ["model", "budget", "by seconds", "by bytes", "at least", "best fixed policy", "moves", "s", "its s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, found in rows.items():
        for label, point in found["budgets"].items():
            policy, ours = best(point), [point["by"][by] for by in ("seconds", "bytes")]
            moved = [*(each["moved_nbytes"] for each in ours), point["bound_nbytes"]]
            cells = [name, f"{label}: {point['budget_nbytes'] / MIB:.1f}", *(f"{nbytes / MIB:.1f}" for nbytes in moved)]
            cells += ["none keeps it", ""] if policy is None else [policy[0], f"{policy[1]['moved_nbytes'] / MIB:.1f}"]
            cells += [f"{ours[0]['seconds']:.4f}", "" if policy is None else f"{policy[1]['seconds']:.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    names = [*MODELS, *ADAPTED]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    rows: dict[str, Row] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if args.table:
        print(table(rows))
        return 0
    warnings.simplefilter("ignore")
    for name in args.models or names:
        rows[name] = row(name)
        FILE.write_text(json.dumps({n: rows[n] for n in names if n in rows}, indent=1) + "\n")
    print(table(rows))
    runs = [run for found in rows.values() for point in found["budgets"].values() for run in point["by"].values()]
    return int(not all(run["equal"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
