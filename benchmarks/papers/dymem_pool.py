"""Dymem's pool with two ends against a pool with one end, PyTorch's allocator and planned addresses, on Dymem's networks.

    python -m benchmarks dymem_pool                     # a minute or two, no framework: networks as graphs
    python -m benchmarks dymem_pool --table             # the table of docs/measurements/dymem_pool.md, from the results

Dymem (Yang and Cheng, HPDC 2020) groups tensors by mobility (GTBM; 3.3.2, Algorithm 3): movable ones from the low end of a
pool, temporary ones from its high end, reclaimed ones beside it. The requests are those of the unmodified step, and of steps
whose feature maps are parked by vDNN's policy, layer by layer, and by Dymem's (3.2). All pools serve the same requests. GTBM's
size is that of the paper's formula with beta = 0; the one-ended pool is best-fit as requests come; the caching allocator is
`plan.allocator`; addresses are of `solvers.placement`. Weights, their gradients and momentum are in none of the pools.

Writes benchmarks/results/dymem_pool.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.lib.paths import RESULTS
from benchmarks.models.papers.networks import network
from benchmarks.papers.mobility import Mobility, mobility, one_ended, two_ended
from benchmarks.papers.transfer_papers import EFFICIENCY, PROFILE
from lightning_memopt import jsonio
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.allocator import Allocator, requests
from lightning_memopt.plan.rates import profile
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.offload.policy import carry_out
from lightning_memopt.solvers.placement import Buffer, faults, place
from lightning_memopt.solvers.placement.buffers import Problem

FILE = RESULTS / "dymem_pool.json"
NETWORKS = (
    ("AlexNet", 256), ("VGG-16", 64), ("ResNet-32", 100), ("ResNet-32, no norm", 100), ("ResNet-50", 100),
    ("ResNet-101", 100), ("ResNet-152", 100), ("Inception V4", 128),
)  # fmt: skip
MAPS = {"kept": None, "parked by vDNN": "vDNN (all)", "parked by Dymem": "Dymem"}
"""What becomes of feature maps between forward and backward: the name of a policy of `solvers.offload`."""
MB = 1e6
PAPER = {
    "ResNet-32, no norm": {"best_fit_MB": 2500, "gtbm_MB": 1854, "where": "Figure 15 (5.4)"},
    "Inception V4": {"best_fit_MB": 3650, "gtbm_MB": 2527, "where": "Figure 12a (5.1); vDNN parks by another policy"},
}
"""What the paper reports in numbers."""
_KINDS = {"addmm": "linear", "_log_softmax": "softmax", "native_dropout": "dropout"}


def groups(graph: Graph) -> dict[int, Mobility]:
    """Tensor -> its group, by the readers in the phase that makes it: the next op of that phase is the next layer."""
    classes: dict[int, Mobility] = {}
    for op in graph.ops:
        following = op.id + 1
        kind = _KINDS.get(op.name.partition("::")[2].partition(".")[0].removesuffix("_backward"), "other")
        for t in op.outputs:
            readers = [reader.id for reader in graph.consumers.get(t, ()) if reader.phase == op.phase]
            classes[t] = mobility(kind, max(len(readers), 1), not readers or following in readers)
    return classes


def requested(graph: Graph, lives: tuple[Life, ...] | None) -> tuple[list[Buffer], list[Mobility]]:
    """The buffers of a step, and their groups. A map that is fetched is read at once: movable, as the paper has it (3.3.2)."""
    of_tensor = groups(graph)
    began: dict[object, tuple[int, int]] = {}
    rows: list[tuple[int, int, int, Mobility]] = []
    actions = requests(graph, lives)
    for moment, (name, nbytes) in enumerate([*actions, *((name, -1) for name in _left(actions))]):
        if nbytes >= 0:
            began[name] = moment, nbytes
            continue
        lower, size = began.pop(name)
        rows.append((lower, moment, size, of_tensor.get(name, "movable") if isinstance(name, int) else "movable"))
    rows = sorted(row for row in rows if row[2])
    return [Buffer(str(row[0]), *row[:3]) for row in rows], [row[3] for row in rows]


def _left(actions: list[Any]) -> list[object]:
    """Names that a step leaves allocated."""
    alive: dict[object, None] = {}
    for name, nbytes in actions:
        if nbytes >= 0:
            alive[name] = None
        else:
            del alive[name]
    return list(alive)


def cached(buffers: list[Buffer]) -> int:
    """Bytes that the model of the caching allocator reserves for two steps of these buffers."""
    allocator = Allocator()
    events = sorted([(b.lower, 1, i) for i, b in enumerate(buffers)] + [(b.upper, 0, i) for i, b in enumerate(buffers)])
    for _ in range(2):
        for _, comes, i in events:
            if comes:
                allocator.alloc(i, buffers[i].size)
            else:
                allocator.free(i)
    return allocator.peak_reserved


def measure(name: str, batch: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of a network: the unmodified step, and those with parked maps."""
    rates = profile(PROFILE)
    assert rates.device is not None
    graph = network(name, batch, rates.device, EFFICIENCY)
    rows = []
    for maps, policy in MAPS.items():
        lives = carry_out(POLICIES[policy], graph, rates)[0] if policy else None
        buffers, mobilities = requested(graph, lives)
        problem = Problem.of(buffers)
        gtbm, one = two_ended(problem, mobilities), one_ended(problem)
        for pool in (gtbm, one):
            assert not faults(buffers, pool.offsets.tolist())
        placement = place(buffers, seconds=seconds)
        assert not faults(buffers, placement.offsets, placement.height_nbytes)
        pools = {
            "one end": one.pool_nbytes, "GTBM": gtbm.pool_nbytes, "caching allocator": cached(buffers),
            "planned": placement.height_nbytes,
        }  # fmt: skip
        rows.append(
            {
                "network": name, "batch": batch, "maps": maps, "buffers": len(buffers), "max_live_nbytes": problem.bound_nbytes,
                "pool_nbytes": pools, "groups": {g: mobilities.count(g) for g in ("movable", "temporary", "reclaimed")},
                "incremental_nbytes": gtbm.incremental_nbytes, "seconds": round(placement.seconds, 2),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/measurements/dymem_pool.md."""
    pools = list(rows[0]["pool_nbytes"])
    head = ("network, batch", "maps", "buffers", "max-live, MB", *(f"{pool}, MB" for pool in pools), "GTBM / one end")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        live, sizes = row["max_live_nbytes"], row["pool_nbytes"]
        cells = [f"{row['network']}, {row['batch']}", row["maps"], str(row["buffers"]), f"{live / MB:,.0f}"]
        cells += [f"{sizes[pool] / MB:,.0f} ({100 * (sizes[pool] / live - 1):.1f} %)" for pool in pools]
        lines.append(f"| {' | '.join(cells)} | {sizes['GTBM'] / sizes['one end']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=[name for name, _ in NETWORKS])
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each placement")
    parser.add_argument("--table", action="store_true", help="print the table of the results, and measure nothing")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = jsonio.read(FILE)["rows"] if FILE.exists() else []
    for name, batch in () if args.table else NETWORKS:
        if args.networks is None or name in args.networks:
            rows = [row for row in rows if row["network"] != name] + measure(name, batch, args.seconds)
            print(rows[-len(MAPS) :], flush=True)
            jsonio.write(FILE, {"simulated": True, "profile": PROFILE, "paper": PAPER, "rows": rows}, indent=1)
    print(table(rows))


if __name__ == "__main__":
    main()
