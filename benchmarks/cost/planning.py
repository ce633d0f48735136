"""What comes before a plan is in force: steps that are observed, and the solve. CPU seconds, one thread.

    python -m benchmarks planning                        # GPT-2 of 12, 24 and 48 layers, narrow; writes results/planning.json
    python -m benchmarks planning --layers 48 --profile  # where the time goes, by function
    python -m benchmarks planning --solve GRAPH.json     # the solve alone, for the graph of a file, and a digest of its plans
    python -m benchmarks planning --graph GRAPH.json --layers 12     # writes such a file

A session observes three steps: in the first, ops that may run again run twice and are compared; in the last, the allocator is
metered. Recording also takes time where nothing is evicted; `python -m benchmarks observed` compares it with eager steps.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import hashlib
import json
import pstats
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.lib.paths import RESULTS
from lightning_memopt import jsonio
from lightning_memopt.graph import Graph, graph_from_json, graph_to_json, unmodified_levels
from lightning_memopt.plan import Machine
from lightning_memopt.runtime import install_native
from lightning_memopt.session.observe import costs
from lightning_memopt.session.observe.graphs import smoothed
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers import planner
from lightning_memopt.trace import count_all

FILE = RESULTS / "planning.json"
LAYERS = (12, 24, 48)
KINDS = {"verified": (True, False), "plain": (False, False), "metered": (False, True)}
"""The three observed steps of a session: whether ops run twice, and whether the allocator is metered."""
STAGES = {
    "echo": "Echo",
    "bound.moments": "minimum cuts",
    "_chains": "stages of chains",
    "simulate": "prices of plans",
    "local_search.smaller": "walk to the smallest plan",
    "local_search.within": "local search for half of the peak",
}
"""Functions that `planner` calls -> what they are called in the table."""
_NO_LIMIT = 1 << 60
"""A budget that evicts nothing: live bytes are compared with it, as in a session."""


class Training:
    """A narrow GPT-2 and AdamW: width 32, 4 heads, 32 words, batch 2, dropout on. Its ops are those of a large one."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=32, n_head=4, vocab_size=128, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0
        )
        words = torch.randint(0, 128, (2, 32))
        self.model: Any = transformers.GPT2LMHeadModel(config).train()
        self.batch = {"input_ids": words, "labels": words}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)


def eager_step(training: Any) -> None:
    """One training step, update included."""
    training.model(**training.batch).loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def observed_step(training: Any, kind: str, limit_nbytes: int = _NO_LIMIT) -> Graph:
    """The same step, observed: its graph."""
    verify, meter = KINDS[kind]
    observation = Observation(training.model, [training.optimizer], torch.device("cpu"), limit_nbytes, verify, meter)
    with observation.begin_round(training.batch):
        loss = training.model(**training.batch).loss
    observation.forward_ended()
    loss.backward()
    del loss
    observation.update_begins()
    training.optimizer.step()
    training.optimizer.zero_grad()
    graph = observation.finish()
    assert graph is not None
    return graph


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = process_time()
    try:
        yield
    finally:
        seconds[name] += process_time() - began


def solved(graph: Graph) -> tuple[planner.Frontier, dict[str, float]]:
    """The frontier, without a time limit, and the seconds of each stage of the solve."""
    seconds: dict[str, float] = defaultdict(float)
    costs.measured(graph)  # once a process

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with timed(seconds, name):
                answer = function(*args, **kwargs)
                return list(answer) if isinstance(answer, Iterator) else answer

        return run

    with contextlib.ExitStack() as stack:
        for path, name in STAGES.items():
            *inside, attribute = path.split(".")
            owner = getattr(planner, inside[0]) if inside else planner
            stack.enter_context(mock.patch.object(owner, attribute, clocked(name, getattr(owner, attribute))))
        overhead = costs.overhead(graph)
        overhead = replace(overhead, of=clocked("costs of our own work", overhead.of))
        with timed(seconds, "solve"):
            half = max(unmodified_levels(graph)) // 2
            frontier = planner.solve(graph, limit_seconds=1e9, machine=Machine(overhead=overhead), budgets=[half])
    of_stages = sum(took for name, took in seconds.items() if name != "solve")
    seconds["plans as lives, and the rest"] = seconds["solve"] - of_stages
    return frontier, dict(seconds)


def digest(frontier: planner.Frontier) -> str:
    """A digest of all plans of a frontier and their prices, without the measured costs of our own work."""
    plans = [(c.lives, c.solver, c.predicted.peak_nbytes, c.predicted.extra_seconds) for c in frontier.candidates]
    return hashlib.sha256(repr((frontier.smallest_nbytes, plans)).encode()).hexdigest()[:16]


def measured(layers: int, profile: bool) -> tuple[dict[str, Any], Graph]:
    training, seconds = Training(layers), defaultdict[str, float](float)
    for _ in range(3):
        eager_step(training)
    with timed(seconds, "eager step"):
        eager_step(training)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    graphs = []
    for kind in KINDS:
        with timed(seconds, kind):
            graphs.append(observed_step(training, kind))
    with timed(seconds, "one graph of three"):
        graph = smoothed(graphs)
    frontier, stages = solved(graph)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    observing = sum(seconds[kind] for kind in KINDS) + seconds["one graph of three"]
    return {
        "ops": len(graph.ops),
        "plans": len(frontier.candidates),
        "seconds": {
            **seconds,
            **stages,
            "plain + solve": seconds["plain"] + stages["solve"],
            "all": observing + stages["solve"],
        },
    }, graph


def table(results: dict[str, Any]) -> str:
    """Markdown: a column for each number of layers."""
    rows = list(results.values())
    lines = [
        "| CPU seconds | " + " | ".join(f"{layers} layers, {row['ops']:,} ops" for layers, row in results.items()) + " |",
        "|---|" + "---|" * len(rows),
    ]
    lines += [f"| {name} | " + " | ".join(f"{row['seconds'][name]:.2f}" for row in rows) + " |" for name in rows[0]["seconds"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--profile", action="store_true", help="print a profile; its seconds are longer, and not recorded")
    parser.add_argument("--graph", type=Path, help="write the graph of the last model to this file")
    parser.add_argument("--solve", type=Path, nargs="+", default=[], help="solve for the graphs of these files alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    install_native(print)
    count_all(print)
    for file in args.solve:
        frontier, seconds = solved(graph_from_json(json.loads(file.read_text())))
        print(f"{file.name}: {seconds['solve']:.2f} s, {len(frontier.candidates)} plans, digest {digest(frontier)}")
    if args.solve:
        return 0
    results: dict[str, Any] = {}
    for layers in args.layers:
        results[str(layers)], graph = measured(layers, args.profile)
    if args.graph:
        args.graph.write_text(json.dumps(graph_to_json(graph)))
    if not args.profile:
        jsonio.write(FILE, results, indent=1)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
