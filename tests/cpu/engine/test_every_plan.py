"""Any plan of a frontier, not only those that budgets happen to choose, runs as predicted: same bits, same bytes.

A plan's schedule is keyed by what autograd asks for and lets go of. The chain programme puts segments and frees where it likes;
where autograd holds the tensor itself, nobody would tell the engine.
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
from tests.cpu.lib.planned import engine_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("deterministic")

CPU = torch.device("cpu")
ROOM_NBYTES = 64
"""Scalars that the loop itself has."""
RUNS = 6
"""Plans of each frontier that are executed; where segments and frees lie is looked at in all of them."""


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
    """Segments and frees lie where the engine is told of it; bits are equal, and bytes as predicted."""
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
