"""What our own work takes: measured, in the prediction, and in the choice of a plan."""

from __future__ import annotations

import itertools

import pytest

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import read_plan
from lightning_memopt.runtime import Program
from lightning_memopt.session import costs
from lightning_memopt.solvers import planner
from tests.cpu.loops import QUIET, batches, sgd, small, train


@pytest.fixture(scope="module")
def run() -> Run:
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(4))
    return run


def test_what_is_measured_is_predicted(run, tmp_path):
    """A plan that changes nothing costs nothing; one that rebuilds costs what was measured, in the plan and in its file."""
    frontier, plan, found = run.session.frontier, run.plan, costs.measured()
    assert found.call >= 0 and found.argument >= 0 and found.recorded > 0 and found.replayed > 0
    assert costs.measured() is found
    assert plan.predicted.replayed_ops > 0
    assert plan.predicted.overhead_seconds == found.of(Program(frontier.graph, plan.lives)) > 0
    assert plan.predicted_seconds == pytest.approx(frontier.graph.step_seconds + plan.predicted.seconds)
    assert found.of(Program(frontier.graph, frontier.candidates[-1].lives)) == 0
    run.session.save_plan(str(tmp_path / "plan.json"))
    assert read_plan(str(tmp_path / "plan.json"))[0].predicted == plan.predicted


def test_a_plan_must_be_worth_its_overhead(run):
    """The more its own work costs, the fewer plans are worth it; the frontier stays one, and the smallest budget what it is."""
    graph = run.session.frontier.graph
    free = planner.solve(graph)
    dear = planner.solve(graph, overhead=lambda lives: float(len(Program(graph, lives).schedule.replayed)))
    assert 1 < len(dear.candidates) < len(free.candidates)
    assert dear.smallest_bytes == free.smallest_bytes
    for one, other in itertools.pairwise(dear.candidates):
        assert one.predicted.peak_bytes < other.predicted.peak_bytes and one.predicted.seconds > other.predicted.seconds
