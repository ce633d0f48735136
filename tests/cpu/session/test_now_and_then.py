"""Steps that do more than others now and then: one plan serves them all, and predicts the most of them to the byte."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.robustness import loops_count
from lightning_memopt import optimize
from lightning_memopt.graph import Graph, Op, Point, Tensor, fingerprint, graph_from_json, graph_to_json
from lightning_memopt.native import install
from lightning_memopt.plan import Life, lower, simulate, validate
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.covering import covering
from lightning_memopt.session.observe.observing import Recurring
from lightning_memopt.solvers import planner
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.now_and_then import LOOPS, WIDTH, Net, between, matrix
from tests.cpu.lib.written import written
from tests.null.graphs import random_steps, training_step

_SLACK_NBYTES = 64
"""A loop may hold a loss or a mean more, or less, than in the observed steps."""
counts = pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")


def with_work(graph: Graph, at: int, nbytes: int, points: int = 1) -> Graph:
    """The graph with another op before point `at`. It makes a tensor that lives for the given number of points."""
    forward = len([op for op in graph.forward if op.at < at])
    within = at <= graph.forward[-1].at
    number = forward if within else len([op for op in graph.ops if op.at < at])

    def moved(p: int) -> int:
        return p + (p >= at)

    ops = [dataclasses.replace(op, id=op.id + (op.id >= number), at=moved(op.at)) for op in graph.ops]
    id = len(graph.tensors)
    phase = "forward" if within else "backward"
    new = Op(id=number, name="work", phase=phase, inputs=(), outputs=(id,), at=at)  # type: ignore[arg-type]
    ops.insert(number, new)
    tensors = [dataclasses.replace(t, born_at=moved(t.born_at), freed_at=moved(t.freed_at)) for t in graph.tensors]
    kind = "activation" if within else "gradient"
    until = min(at + points - 1, len(graph.points))
    tensors.append(
        Tensor(id=id, name="work", nbytes=nbytes, kind=kind, storage=id, born_at=at, freed_at=until)  # type: ignore[arg-type]
    )
    saves = [
        dataclasses.replace(
            s,
            op=s.op + (s.op >= number),
            unpacked_at=tuple(map(moved, s.unpacked_at)),
            released_at=moved(s.released_at),
        )
        for s in graph.saves
    ]
    named = [Point("op", p.id + (p.id >= number)) if p.kind == "op" else p for p in graph.points]
    named.insert(at, Point("op", number))
    return dataclasses.replace(graph, ops=tuple(ops), tensors=tuple(tensors), saves=tuple(saves), points=tuple(named))


def as_lives_of(graph: Graph, lives: tuple[Life, ...], other: Graph) -> tuple[Life, ...]:
    """Lives of `graph`, on the axis of `other`: by the events at which they begin and end."""
    names = [op.name for op in graph.forward]
    kept = [op.id for op in other.forward if op.name in names]
    tensor = {
        a: b for op, j in zip(graph.forward, kept, strict=True) for a, b in zip(op.outputs, other.ops[j].outputs, strict=True)
    }
    at_op = {op.at: other.ops[j].at for op, j in zip(graph.forward, kept, strict=True)}
    events = {(p.kind, p.id, p.occurrence): i for i, p in enumerate(other.points) if p.kind != "op"}

    def moved(p: int) -> int:
        point = graph.points[p]
        return at_op[p] if point.kind == "op" else events[point.kind, point.id, point.occurrence]

    return tuple(
        dataclasses.replace(life, tensor=tensor[life.tensor], born_at=moved(life.born_at), freed_at=moved(life.freed_at))
        for life in lives
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_predicts_the_most_of_all_steps(seed: int) -> None:
    """Three steps with work at other points of each: the peak of each plan of the graph that covers them is the largest of the
    peaks that the plan has in them."""
    rng = random.Random(seed)
    graph = training_step(random_steps(rng, 12))
    largest = 4 * max(t.nbytes for t in graph.tensors)
    steps = [graph]
    for _ in range(2):
        more = graph
        for _ in range(3):
            more = with_work(more, rng.randrange(1, len(more.points)), rng.randint(1, largest))
        steps.append(more)
    covered = covering(graph, steps)
    assert fingerprint(covered) == fingerprint(graph), "a planned step is compared with the forward"
    assert graph_from_json(graph_to_json(covered)).points == covered.points
    plans = planner.solve(covered, limit_seconds=2).candidates
    for plan in plans:
        lives = plan.lives
        assert validate(covered, lives, lower(covered, lives)).ok
        peaks = [simulate(step, as_lives_of(covered, lives, step)).predicted.peak_nbytes for step in steps]
        assert plan.predicted.peak_nbytes == max(peaks), (peaks, plan.solver)


@pytest.mark.parametrize("later", [False, True])
def test_a_gradient_leaves_when_the_last_of_all_steps_has_it(later: bool) -> None:
    """Where autograd accumulates it, after the work that another step does before. `later`: that step accumulates it later."""
    graph = training_step(random_steps(random.Random(0), 12))
    first, *_, last = (op for op in graph.ops if op.phase == "backward" and op.outputs)
    graph = dataclasses.replace(graph, gradients={"weight": (first.outputs[0], first.at)})
    more = with_work(graph, first.at, 4096)
    at = (last if later else first).at + 1
    more = dataclasses.replace(more, gradients={"weight": (first.outputs[0], at)})
    covered = covering(graph, [graph, more])
    ((_, point),) = covered.gradients.values()
    op = covered.ops[covered.points[point].id]
    assert len(covered.points) == len(graph.points) + 1 and op.at == point
    assert op.outputs == (last if later else first).outputs


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_below_any_step(seed: int) -> None:
    """As above, where results of the model and of the work are held for a while: a bound, which may be above."""
    rng = random.Random(seed)
    graph = training_step(random_steps(rng, 12))
    more = graph
    for _ in range(4):
        more = with_work(more, rng.randrange(1, len(more.points)), rng.randint(1, 8), rng.randint(1, 9))
    results = [t.id for t in more.tensors if t.kind == "activation" and t.name != "work" and t.id not in more.overwritten]
    tensors = list(more.tensors)
    for id in rng.sample(results, 3):
        tensors[id] = dataclasses.replace(tensors[id], freed_at=min(tensors[id].freed_at + 5, len(more.points) - 1))
    more = dataclasses.replace(more, tensors=tuple(tensors))
    covered = covering(graph, [more])
    for plan in planner.solve(covered, limit_seconds=2).candidates:
        for step in (graph, more):
            peak = simulate(step, as_lives_of(covered, plan.lives, step)).predicted.peak_nbytes
            assert peak <= plan.predicted.peak_nbytes


def test_steps_that_are_alike_change_nothing() -> None:
    graph = training_step(random_steps(random.Random(0), 12))
    assert graph_to_json(covering(graph, [dataclasses.replace(graph)])) == graph_to_json(graph)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of each loop."""
    return written("now_and_then", tmp_path_factory.mktemp("trained"), timeout=300, **loops_count.environment())


@counts
@needs_native
@pytest.mark.parametrize("name", [name for name in LOOPS if "later" not in name])
def test_observed_steps_that_differ_are_planned_for(trained: dict[str, Any], name: str) -> None:
    """Every planned step keeps to its prediction, by a count from outside, and the steps that do more reach it."""
    found = trained[name]
    assert found["same"] and found["planned"]
    for more, peak, predicted in found["planned"]:
        assert peak <= predicted + _SLACK_NBYTES, found["planned"]
        assert not more or peak >= 0.99 * predicted, found["planned"]


@counts
@needs_native
@pytest.mark.parametrize("name", [name for name in LOOPS if "later" in name])
def test_steps_that_do_more_later_are_observed(trained: dict[str, Any], name: str) -> None:
    """After the second such step, the next one is observed. From then on the plan keeps to its prediction."""
    found = trained[name]
    loop = LOOPS[name]
    assert found["same"]
    unplanned = loop.steps - len(found["planned"])
    after = found["planned"][loop.first + 2 * loop.every - unplanned + 2 :]
    assert sum(more for more, *_ in after) >= 2
    for more, peak, predicted in after:
        assert peak <= predicted + _SLACK_NBYTES, found["planned"]
        assert not more or peak >= 0.99 * predicted, found["planned"]
    assert "where that happens again, such a step is observed" in found["said"]
    assert found["said"].count("is due; observing it (1 of 3)") == 1


def test_when_the_next_one_is_due() -> None:
    """The next such step is due after as many steps as there were between the last two."""
    recurring = Recurring()
    assert recurring.again(ahead=1) is None, "the first one may be the only one"
    assert [recurring.step_ended() for _ in range(4)] == [False] * 4
    assert recurring.again(ahead=1) is False
    assert [recurring.step_ended() for _ in range(4)] == [False, False, True, False], "the fourth one is observed"
    recurring.again(ahead=1)
    recurring.step_ended()
    assert recurring.again(ahead=1) is True, "two in a row: the next one, too"


@needs_native
def test_steps_that_do_more_at_no_regular_distance_are_told_of() -> None:
    """If such a step is overdue three times, one line says so, once."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.warns(UserWarning, match="some steps do more than those that were observed") as said:
        with optimize(model, optimizer, budget="min", verbose=False) as run:
            for i in range(36):
                between(model, optimizer, torch.randn(64, WIDTH), i in (5, 8, 13, 20, 29, 34), {})
    assert sum("some steps do more" in str(w.message) for w in said) == 1
    state = state_of(run)
    assert isinstance(state, Running) and state.past.again == 3


@needs_native
def test_a_budget_is_kept_after_a_heavier_step_was_observed() -> None:
    """The plan is replaced at once; when such a step was observed, one plan is for all of them, and is predicted right."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    kept: dict[str, Any] = {}
    counted = install()
    assert counted is not None
    with optimize(model, optimizer, budget=counted.live_nbytes + 800_000, verbose=False) as run:
        for i in range(24):
            matrix(model, optimizer, torch.randn(256, WIDTH), i > 3 and i % 3 == 1, kept)
        status = run.status()
    assert status.budget_nbytes is not None and status.predicted_peak_nbytes is not None
    assert 0 < (status.measured_peak_nbytes or 0) <= status.predicted_peak_nbytes + _SLACK_NBYTES
    assert status.predicted_peak_nbytes <= status.budget_nbytes


@needs_native
def test_the_first_step_counts_its_new_state_once_whatever_later_steps_begin_with() -> None:
    """Adam makes counters where no op is seen. Later steps begin with a loss that the first one does not have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))
    optimizer = torch.optim.Adam(model.parameters())
    with optimize(model, optimizer, budget="100%", verbose=False) as run:
        for _ in range(6):
            loss = model(torch.ones(256, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        status = run.status()
    assert status.predicted_peak_nbytes == status.measured_peak_nbytes
