"""What our own work takes: measured, in the prediction, and in the choice of a plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import Machine, Overhead, read_plan
from lightning_memopt.record import recorder
from lightning_memopt.record.rules import may_run_again
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.early_updates import ALLOWED
from lightning_memopt.session import times
from lightning_memopt.session.observe import costs
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from tests.cpu.lib.counting import Counting
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train
from tests.cpu.lib.observed_graph import CPU
from tests.cpu.lib.tracing import untraced

pytestmark = pytest.mark.real_times


@pytest.fixture(scope="module")
def run() -> Run:
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", max_slowdown=1e6, **QUIET) as run:
        train(model, optimizer, batches(4))
    return run


@untraced
def test_what_is_measured_is_predicted(run, tmp_path):
    """A plan that changes nothing costs nothing; one that rebuilds costs what was measured, in the plan and in its file."""
    frontier, plan, found = run.status().frontier, run.plan, costs.measured(run.status().frontier.graph)
    # differences of times, at least 0: on a busy machine the larger one may have been measured the smaller
    assert min(found.call, found.argument, found.recorded, found.rebuilt, found.segment) >= 0
    assert costs.measured(frontier.graph) is found
    assert plan.predicted.rebuilt_ops > 0
    assert plan.predicted.overhead_seconds == found.of(Program(frontier.graph, plan.lives)) > 0
    assert plan.step_seconds == frontier.graph.step_seconds
    assert found.of(Program(frontier.graph, frontier.candidates[-1].lives)) == 0
    run.save_plan(str(tmp_path / "plan.json"))
    assert read_plan(str(tmp_path / "plan.json"))[0].predicted == plan.predicted


def test_costs_are_found_from_times_of_runs(monkeypatch):
    """Timed runs are made up from known costs, and these costs are found again."""
    true = costs.Costs(call=3e-6, argument=0.0, recorded=5e-6, rebuilt=7e-6, forward=1e-4, segment=2e-5)
    alone, touching, ops, few = 1e-6, 2e-7, 4 * costs._LINKS, 4
    chain = costs._Chain(costs._LINKS, torch.device("cpu"))
    graph = chain.graph()

    def in_backward(links):
        schedule = Program(graph, costs._checkpointed(graph, links)).schedule
        return len(schedule.runs) * (alone + true.rebuilt) + len(schedule.segments) * true.segment

    def medians(runs, device):
        took = dict.fromkeys(runs, 0.0)
        took |= {"forward": 1e-3, "short": 2e-4, "step": 3e-3, "alone": ops * (alone + touching), "touching": ops * touching}
        took["passing"] = took["forward"] + true.forward + true.call * ops
        took["short, passing"] = took["short"] + true.forward + true.call * few
        took["rebuilding"] = took["few segments"] = took["passing"] + true.recorded * ops
        backward = took["step"] - took["forward"]
        took["rebuilding, step"] = took["rebuilding"] + backward + in_backward(1)
        took["few segments, step"] = took["few segments"] + backward + in_backward(costs._LINKS // 2)
        return took

    monkeypatch.setattr(costs, "_medians", medians)
    found = costs._measured(torch.device("cpu"))
    assert asdict(found) == pytest.approx(asdict(true))


@untraced
def test_an_op_that_runs_twice_costs_twice(run):
    """`Plan.predicted.rebuilt_ops` counts runs, and so does the price; and each segment has its own."""
    graph = run.status().frontier.graph
    only = costs.Costs(call=0.0, argument=0.0, recorded=0.0, rebuilt=1.0)
    for candidate in run.status().frontier.candidates:
        program = Program(graph, candidate.lives)
        assert only.of(program) == candidate.predicted.rebuilt_ops
        assert replace(only, rebuilt=0.0, segment=1.0).of(program) == len(program.segments)
    program = Program(graph, recompute_everything(graph))
    assert only.of(program) == len(program.schedule.runs) > len(program.schedule.rebuilt)


@pytest.mark.parametrize(("host", "expected"), [(0.0, 6.0), (0.5, 0.0), (2.0, 6.0)], ids=["none", "faster", "slower"])
def test_what_an_op_costs_counts_where_no_device_hides_it(run, host: float, expected: float):
    """`host`: how long it takes for the step's ops beside a device, as a share of what the device takes."""
    graph = run.status().frontier.graph
    eager = host * graph.step_seconds / len(graph.ops)
    taken = costs.Costs(call=1.0, argument=1.0, recorded=2.0, rebuilt=3.0, eager=eager, segment=4.0)
    assert taken.of_rebuilt_op(graph) == expected, "a segment runs four ops, about"


def test_measured_beside_whatever_is_entered_here():
    """A budget may be refused in the middle of a step: its modes and precision have no part in what is measured."""
    with Counting() as mode, torch.autocast("cpu"), torch.no_grad():
        found = costs.in_own_thread(lambda: costs._measured(CPU), CPU)
    assert mode.ops == 0 and max(found.call, found.recorded) > 0 <= found.rebuilt


def test_measured_where_convolutions_never_run_again(monkeypatch):
    """As on CUDA with `torch.backends.cudnn.benchmark`: the chain used for measuring still rebuilds its own tensors."""

    def may_run(func, device_type):
        return "convolution" not in str(func) and may_run_again(func, device_type)

    monkeypatch.setattr(recorder, "may_run_again", may_run)
    lives = costs._checkpointed(costs._Chain(4, CPU).graph())
    assert any(life.how == "rebuild" for life in lives)


def test_a_plan_must_be_worth_its_overhead(run):
    """Plans whose own work takes more than they save leave the frontier; the smallest budget stays what it is."""
    graph = run.status().frontier.graph
    free = planner.solve(graph)
    rank = {c.lives: 1.0 + i for i, c in enumerate(free.candidates)}  # the larger the peak, the dearer
    dear = planner.solve(graph, machine=Machine(overhead=Overhead(lambda lives: rank.get(lives, 100.0))))
    assert len(free.candidates) > 2
    assert [c.lives for c in dear.candidates] == [free.candidates[0].lives]
    assert dear.smallest_nbytes == free.smallest_nbytes


@pytest.mark.parametrize("kind", ALLOWED)
def test_an_early_update_is_timed_beside_the_user(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an optimizer of its own: the user's is not stepped, and hooks for all optimizers are not called."""
    monkeypatch.setattr(times, "current", times.Times())
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    optimizer, steps = kind([p]), list[object]()
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        seconds = costs.of_early_update(optimizer, torch.device("cpu"))
    finally:
        hook.remove()
    assert 0.0 <= seconds < 1.0 and not steps
    assert torch.equal(p, torch.ones(4, 4))
