"""Any plan of a frontier, not only those that budgets happen to choose, runs as predicted: same bits, same bytes.

The engine follows a plan's schedule at the unpacks and releases of its handles. The chain program may put segments and frees at
other points: if autograd holds the tensor itself there, nothing tells the engine that the point has come.
"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.models.zoo import ZOO  # noqa: E402
from lightning_memopt.graph import Graph, resident_nbytes  # noqa: E402
from lightning_memopt.runtime import Program  # noqa: E402
from lightning_memopt.session.forward.recording import PlannedRecording  # noqa: E402
from lightning_memopt.session.observe.graphs import smoothed  # noqa: E402
from lightning_memopt.session.observe.observation import Observation  # noqa: E402
from lightning_memopt.solvers import planner  # noqa: E402
from lightning_memopt.trace import metered_cpu  # noqa: E402
from tests.cpu.lib.planned_engine import engine_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("deterministic")

CPU = torch.device("cpu")
ROOM_NBYTES = 64
"""Bytes of scalars that the loop itself holds."""
RUNS = 6
"""Number of plans of each frontier that are executed; the points of segments and frees are checked in all plans."""


class Tiny:
    """A tiny model of the zoo, and its step under a program."""

    def __init__(self, name: str) -> None:
        self.architecture = ZOO[name]
        torch.manual_seed(0)
        self.model, self.batch = self.architecture.build()

    def step(self, program: Program | None = None) -> list[torch.Tensor | None]:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        if program is None:
            loss = self.architecture.loss(self.model(**self.batch))
        else:
            with PlannedRecording(engine_of(program), self.model):
                loss = self.architecture.loss(self.model(**self.batch))
        loss.backward()
        return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in self.model.parameters())]

    def peak_nbytes(self, program: Program) -> int:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with metered_cpu() as events:
            with PlannedRecording(engine_of(program), self.model):
                loss = self.architecture.loss(self.model(**self.batch))
            loss.backward()
            del loss
        return events.peak_nbytes

    def graph(self) -> Graph:
        graphs = []
        for last in (False, True):
            self.model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            observation = Observation(self.model, [], CPU, None, verify=False, meter=last)
            with observation.begin_round(self.batch):
                loss = self.architecture.loss(self.model(**self.batch))
            observation.forward_ended()
            loss.backward()
            del loss
            graph = observation.finish()
            assert graph is not None
            graphs.append(graph)
        return smoothed(graphs)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_every_plan_runs_as_predicted(name: str) -> None:
    """Segments and frees are at points of which the engine is told. Results have the same bits, and the peak is as
    predicted.
    """
    tiny = Tiny(name)
    tiny.step()
    expected = tiny.step()
    graph = tiny.graph()
    resident = resident_nbytes(graph)
    points = graph.points
    for objective in ("throughput", "flops"):
        candidates = planner.solve(graph, objective=objective).candidates
        for i, candidate in enumerate(candidates):
            program = Program(graph, candidate.lives)
            handled = {save for save, _ in program.saved}
            assert all(points[p].id in handled for p in program.schedule.segments)
            frees = ((p, t) for p, ts in program.schedule.frees.items() if points[p].kind != "op" for t in ts)
            assert all(points[p].id in handled for p, t in frees if t in program.tracked)
            if i % max(1, len(candidates) // RUNS):
                continue
            planned = tiny.step(program)
            for a, b in zip(expected, planned, strict=True):
                assert (a is None) == (b is None) and (a is None or (b is not None and torch.equal(a, b)))
            predicted, measured = candidate.predicted.peak_nbytes - resident, tiny.peak_nbytes(program)
            assert abs(measured - predicted) <= ROOM_NBYTES, (objective, candidate.solver)
