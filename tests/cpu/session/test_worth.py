"""The search for a plan takes no longer than the plan can save, and the smallest plan is within `max_slowdown`: by known
times."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, Op, resident_nbytes
from lightning_memopt.session.worth import worth
from lightning_memopt.solvers import joint, planner
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, assert_same, state
from tests.cpu.lib.times import FREE, Known, given


class Chain(nn.Module):
    """Tiny ops: to run one again takes much longer than the op."""

    def __init__(self, links: int = 30) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, 8))
        self.links = links

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.links):
            x = torch.tanh(x * self.scale) + x.sin() * 0.1
        return x


class Each(Known):
    """Every op takes the same time, and our own work as `costs` says."""

    def __init__(self, seconds: float, costs: Any = Known.costs) -> None:
        self.seconds, self.costs = seconds, costs

    def of_op(self, graph: Graph, op: Op) -> float:
        return self.seconds


def trained(**options: Any) -> tuple[Any, dict[str, Tensor], list[str]]:
    """(the state in force, the parameters, what was said) after a few steps."""
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said: list[str] = []
    with optimize(model, optimizer, **({"budget": "min"} | QUIET | options)) as run:
        run.session.say = said.append
        for i in range(4):
            optimizer.zero_grad()
            model(torch.randn(64, 8, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            optimizer.step()
        found = state_of(run)
    return found, state(model), said


@pytest.mark.parametrize("slowdown", [1.0, 3.0, 6.0, math.inf])
def test_the_smallest_plan_within_a_slowdown(slowdown: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own work for each op counts. Each plan is the smallest of those allowed; bits are those of the plain run."""
    given(monkeypatch, Each(2e-6))
    found, ours, said = trained(max_slowdown=slowdown)
    _, plain, _ = trained(budget="100%")
    assert_same(plain, ours)
    plan, frontier = found.plan, found.frontier
    assert plan.predicted.overhead_seconds > plan.predicted.extra_seconds or not plan.predicted.rebuilt_ops
    allowed = [c for c in frontier.candidates if c.predicted.seconds <= (slowdown - 1) * plan.step_seconds]
    assert plan.lives in {c.lives for c in allowed}
    assert plan.budget_nbytes <= max(frontier.smallest_nbytes, min(c.least_budget_nbytes for c in allowed))
    assert (plan.predicted.rebuilt_ops == 0) == (slowdown == 1.0)
    told = [line for line in said if "max_slowdown" in line]
    assert len(told) == (plan.budget_nbytes > frontier.smallest_nbytes)
    if slowdown in (1.0, math.inf):
        assert len(told) == (slowdown == 1.0)


def test_our_own_work_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ops take as long but our own work takes none, the same slowdown allows a smaller plan."""
    sizes = []
    for costs in (Known.costs, FREE):
        given(monkeypatch, Each(2e-6, costs))
        state = trained()[0]
        sizes.append(state.plan.predicted_peak_nbytes - resident_nbytes(state.program.graph))  # without what the process holds
    with_our_work, without = sizes
    assert without < 0.8 * with_our_work


def test_a_search_takes_as_long_as_some_steps() -> None:
    def of(step_seconds: float, **options: Any) -> float:
        graph = Graph(ops=(), tensors=(), saves=(), points=(), device="cpu", step_seconds=step_seconds)
        return worth(graph, MemOptConfig(budget="min", **options))

    assert [of(seconds) for seconds in (0.0, 0.01, 0.1, 0.5, 10.0)] == [1.0, 1.0, 5.0, 25.0, 30.0]
    assert of(10.0, solver_seconds=2.0) == 2.0 and of(0.0, solver_seconds=0.1) == 0.1


@pytest.mark.parametrize("options", [{}, {"offload": "disk"}], ids=["rebuilt", "parked"])
def test_each_search_of_a_session_is_limited_by_the_seconds_of_its_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for a plan, the joint search, and those of a refusal in the middle of a step."""
    given(monkeypatch, Each(2e-3, FREE))
    asked: list[float] = []
    wanted: list[float] = []
    solve, solve_joint = planner.solve, joint.solve_joint

    def solved(graph: Graph, machine: Any, **given_options: Any) -> Any:
        asked.append(given_options["search_seconds"])
        wanted.append(max(1.0, 50 * graph.step_seconds))
        return solve(graph, machine, **given_options)

    def jointly(graph: Graph, *args: Any, **given_options: Any) -> Any:
        asked.append(given_options["limit_seconds"])
        wanted.append(max(1.0, 50 * graph.step_seconds))
        return solve_joint(graph, *args, **given_options)

    monkeypatch.setattr(planner, "solve", solved)
    monkeypatch.setattr(joint, "solve_joint", jointly)
    found, _, _ = trained(solver_seconds=1000.0, **options)
    assert asked == wanted and len(asked) >= (2 if options else 1) and min(asked) > 1.0
    asked.clear()
    wanted.clear()
    with pytest.raises(InfeasibleError):
        trained(solver_seconds=1000.0, budget=found.frontier.smallest_nbytes // 2, **options)
    assert asked == wanted and bool(asked) == bool(options)
