"""What our own work takes: measured, in the prediction, and in the choice of a plan."""

from __future__ import annotations

import itertools
import random

from lightning_memopt import optimize
from lightning_memopt.plan import read_plan
from lightning_memopt.runtime import Program
from lightning_memopt.session import costs
from lightning_memopt.solvers import planner
from tests.cpu.loops import QUIET, batches, sgd, small, train
from tests.null.graphs import random_steps, training_step


def test_measured_once_and_nothing_is_left(tmp_path):
    """A plan that changes nothing costs nothing; one that rebuilds costs what is measured, in the plan and in its file."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(4))
        run.session.save_plan(str(tmp_path / "plan.json"))
        frontier = run.session.frontier
    assert frontier is not None and run.plan is not None
    graph, found = frontier.graph, costs.measured()
    assert found.call >= 0 and found.argument >= 0 and found.recorded > 0 and found.replayed > 0
    assert costs.measured() is found
    predicted = run.plan.predicted
    assert predicted.replayed_ops > 0
    assert predicted.overhead_seconds == found.of(Program(graph, run.plan.lives)) > 0
    assert run.plan.predicted_seconds == graph.step_seconds + predicted.extra_seconds + predicted.overhead_seconds
    assert found.of(Program(graph, frontier.candidates[-1].lives)) == frontier.candidates[-1].predicted.overhead_seconds
    plan, _ = read_plan(str(tmp_path / "plan.json"))
    assert plan.predicted == predicted


def test_a_plan_must_be_worth_its_overhead():
    """With a cost of recording, plans that save no time against one with a larger peak leave the frontier; it stays monotone."""
    graph = training_step(random_steps(random.Random(3), 60))
    free = planner.solve(graph)
    replays = {c.lives: c.predicted.replayed_ops for c in free.candidates}
    dear = planner.solve(graph, overhead=lambda lives: 10.0 if replays.get(lives, 1) else 0.0)
    assert len(free.candidates) > 2
    assert dear.candidates[-1].predicted.seconds == 0.0
    for one, other in itertools.pairwise(dear.candidates):
        assert one.predicted.peak_bytes < other.predicted.peak_bytes and one.predicted.seconds > other.predicted.seconds
