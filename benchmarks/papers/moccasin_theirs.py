"""Moccasin's own solver on one of its graphs; benchmarks/papers/moccasin.py calls `main` in a process of its own.

In: the path of a clone of github.com/haoming-codes/moccasin, of a graph in it, a share of the unmodified peak, seconds.
Out: a line of JSON. The constraint model is theirs, run as their main.py does: two intervals an op, 16 workers, first a
phase that lowers the peak to the budget, then one that lowers the duration. Changed, without a change to its files:

- The package `rockmate`, which the solver imports for another purpose, is left out.
- What OR-Tools and networkx have renamed since is called by its new name, and gets lists where it takes no generators any more.
- The first phase gets half of the seconds, as in their main.py, and the second one all that is left. To build the model, and to
  read the answer, takes no part of them.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.papers.moccasin_graphs import Dag, read


class TwoPhases(cp_model.CpSolver):  # type: ignore[misc]
    """A solver that shares its seconds between their two phases, and keeps what their code prints."""

    limit_seconds = 0.0
    used_seconds = 0.0
    phases: list[str]
    bound = 0.0

    def Solve(self, model: cp_model.CpModel) -> Any:
        return self._timed(model, self.limit_seconds / 2)

    def SolveWithSolutionCallback(self, model: cp_model.CpModel, callback: Any) -> Any:
        return self._timed(model, self.limit_seconds - TwoPhases.used_seconds, callback)

    def _timed(self, model: cp_model.CpModel, seconds: float, callback: Any = None) -> Any:
        self.parameters.max_time_in_seconds = seconds
        self.parameters.log_search_progress = False
        began = time.perf_counter()
        status = self.solve(model, callback)
        TwoPhases.used_seconds += time.perf_counter() - began
        TwoPhases.phases.append(self.status_name(status))
        TwoPhases.bound = self.best_objective_bound
        return status


def solver(clone: Path) -> types.ModuleType:
    """Their module, from the clone."""
    rockmate = types.ModuleType("rockmate.def_op")
    for name in ("RunOp", "DelOp", "OpSchedule"):
        setattr(rockmate, name, None)
    sys.modules |= {"rockmate": types.ModuleType("rockmate"), "rockmate.def_op": rockmate}
    sys.path.insert(0, str(clone / "src"))
    return importlib.import_module("moccasin.cp")


def as_networkx(dag: Dag) -> Any:
    """The graph as their solver takes it: nodes are places in the order."""
    import networkx

    graph = networkx.DiGraph(name=dag.name)
    for v in range(len(dag)):
        graph.add_node(v, cost_ram=dag.nbytes[v], cost_cpu=dag.durations[v])
    graph.add_edges_from((u, v) for v, reads in enumerate(dag.reads) for u in reads)
    return graph


class Proto:
    """The model's data, whose `ClearField` newer OR-Tools does not have."""

    def __init__(self, proto: Any) -> None:
        self._proto = proto

    def ClearField(self, name: str) -> None:
        getattr(self._proto, f"clear_{name}")()


def main() -> None:
    clone, path, share, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    dag = read(path)
    theirs: Any = solver(clone)
    TwoPhases.limit_seconds, TwoPhases.phases = seconds, []
    theirs.cp_model.CpSolver = TwoPhases
    flatten = theirs.flatten
    theirs.flatten = lambda nested: list(flatten(nested))
    plain = cp_model.CpModel.Proto
    cp_model.CpModel.Proto = lambda self: Proto(plain(self) if callable(plain) else self.proto)
    order = list(range(len(dag)))
    peak, _ = dag.measure(order)
    kept: dict[str, Any] = {}
    theirs.maybe_dump = lambda result, _: kept.update(result)
    began, printed = time.perf_counter(), sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.stdout = sys.stderr
        theirs.remat(
            G=as_networkx(dag), B=math.ceil(peak * share), C=2, timeout=seconds, discretized=True, reservoir=True,
            use_end_global=False, use_stage=True, topo_order=order, phase1=True, use_interval_length_domain=True, use_gcd=True,
            reservoir_option=2, log_dir=folder,
        )  # fmt: skip
        sys.stdout = printed
    answer = {
        "phases": TwoPhases.phases,
        "seconds": round(TwoPhases.used_seconds, 2),
        "wall_seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "schedule": kept.get("schedule"),
        "bound": TwoPhases.bound * math.gcd(*dag.durations) if len(TwoPhases.phases) == 2 else None,
    }
    print(json.dumps(answer))
