"""Reserved bytes of a planned step: requested bytes are those of the simulator, segments those of the allocator's rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from build import Step, random_step

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor, unmodified_levels
from lightning_memopt.plan import lower, simulate, validate
from lightning_memopt.plan.allocator import Allocator
from lightning_memopt.plan.allocator.reserved import _spans, _Step, reserved
from lightning_memopt.plan.allocator.settings import MIB, Settings
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.solvers.recompute.draft import Draft
from lightning_memopt.solvers.rollout import Rollout, keep_all


def scaled(graph: Graph, by: int, device: str = "cuda") -> Graph:
    """The same graph with tensors, workspaces and states larger, on a CUDA device."""
    return replace(
        graph,
        device=device,
        tensors=tuple(replace(t, nbytes=t.nbytes * by) for t in graph.tensors),
        ops=tuple(replace(op, workspace_nbytes=op.workspace_nbytes * by, state_nbytes=op.state_nbytes) for op in graph.ops),
    )


@pytest.mark.parametrize("seed", range(60))
def test_requested_bytes_are_those_of_the_simulator(seed: int) -> None:
    rng = random.Random(seed)
    graph = replace(random_step(rng, 16), device="cuda")
    some = Rollout(graph)
    held = {t for t in graph.producers if rng.random() < 0.5 or t in graph.anchors} - graph.overwritten
    plans = [keep_all(graph), recompute_everything(graph)]
    try:
        some.serve(sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at), held)
        plans.append(some.lives())
    except ValueError:
        pass
    for lives in plans:
        try:
            predicted = simulate(graph, lives).predicted
        except planner.LoweringError:
            continue
        found = reserved(graph, lives)
        assert found.requested_nbytes == predicted.peak_nbytes
        assert found.requested_nbytes <= found.allocated_nbytes <= found.peak_nbytes
    assert reserved(graph, keep_all(graph)).requested_nbytes == max(unmodified_levels(graph))


def test_states_of_generators_take_memory_of_the_host_alone() -> None:
    step = Step()
    (noise,) = step.op(step.given(), makes=(64,), state=1000)
    step.op(noise, makes=(8,), saves=(noise,))
    of_host = step.build()
    of_cuda = replace(of_host, device="cuda")
    lives = recompute_everything(of_host)
    peaks = [simulate(graph, lives).predicted.peak_nbytes for graph in (of_host, of_cuda)]
    assert peaks[0] - peaks[1] == 1000 and reserved(of_cuda, lives).requested_nbytes == peaks[1]
    for graph, peak in zip((of_host, of_cuda), peaks, strict=True):
        assert validate(graph, lives, lower(graph, lives)).peak_nbytes == Draft(graph, lives).nbytes.max() == peak


def chain(size: int, layers: int = 6, state: int = 0) -> Graph:
    """Layers in a row, each saves what it makes; one parameter; optimizer state where asked for."""
    step = Step(device="cuda")
    (t,) = (step.given(2 * MIB),)
    if state:
        step.given(state, "optimizer_state")
    for i in range(layers):
        (t,) = step.op(t, makes=(size,), saves=("out",), seconds=1.0 + i / 8)
    return step.build(gradient=512)


def test_a_step_of_equal_tensors_reserves_what_they_take() -> None:
    graph = chain(32 * MIB)
    found = reserved(graph, keep_all(graph))
    assert found.allocated_nbytes <= found.requested_nbytes + 2048
    # six segments of 32 MiB; the parameter in one of 20; gradients in one of 2
    assert found.peak_nbytes == (6 * 32 + 20 + 2) * MIB


def test_tensors_of_an_odd_size_are_rounded_to_segments() -> None:
    graph = chain(31 * MIB)
    assert reserved(graph, keep_all(graph)).peak_nbytes == (6 * 32 + 20 + 2) * MIB
    rounding = Settings.parse("roundup_power2_divisions:2")
    assert reserved(graph, keep_all(graph), rounding).peak_nbytes == (6 * 32 + 20 + 2) * MIB
    assert reserved(chain(33 * MIB), keep_all(graph), rounding).peak_nbytes == (6 * 48 + 20 + 2) * MIB
    assert reserved(graph, keep_all(graph), Settings(expandable=True)).peak_nbytes == (200 + 2) * MIB  # 6 * 31 + 2, in 20s


def test_state_that_the_first_update_made_pins_segments_of_activations() -> None:
    """It is cut from a cached segment, which cannot be given back before the planned steps."""
    plain, with_state = chain(32 * MIB), chain(32 * MIB, state=3 * MIB)
    found, without = (reserved(g, recompute_everything(g)) for g in (with_state, plain))
    assert found.requested_nbytes == without.requested_nbytes + 3 * MIB
    assert found.peak_nbytes == without.peak_nbytes, "3 MiB fit into the segment of 20 MiB that the parameter is in"
    large = chain(32 * MIB, state=24 * MIB)
    found = reserved(large, recompute_everything(large))
    assert found.peak_nbytes == without.peak_nbytes + 32 * MIB, "a cached segment of 32 MiB, of which 24 are pinned"


def test_versions_of_a_storage_are_one_allocation() -> None:
    step = Step(device="cuda")
    (a,) = step.op(step.given(MIB), makes=(32 * MIB,))
    (b,) = step.op(a, makes=(), mutates=(a,))
    step.op(b, makes=(8,), mutates=(b,))
    graph = step.build()
    spans = [s for s in _spans(graph, {}) if s.nbytes == 32 * MIB]
    assert [(s.name, s.born_at, s.freed_at) for s in spans] == [(a, 0, 2)]
    assert [s.freed_at for s in _spans(graph, {b + 2: 3}) if s.nbytes == 32 * MIB] == [3]


def test_gradients_that_the_next_step_frees_stay_where_they_are() -> None:
    """What one step leaves is what the next one starts from, also where another block would fit better."""
    sizes = {"old": (24, BEFORE, 0), "other": (24, 1, 3), "activation": (64, 1, 2), "new": (24, 3, 4), "end": (0, 4, 4)}
    tensors = tuple(
        Tensor(id=i, name=name, nbytes=nbytes * MIB, kind="gradient", storage=i, born_at=born_at, freed_at=freed_at)
        for i, (name, (nbytes, born_at, freed_at)) in enumerate(sizes.items())
    )
    made: dict[int, tuple[int, ...]] = {1: (1, 2), 3: (3,), 4: (4,)}
    ops = tuple(Op(id=i, name="op", phase="backward", inputs=(), outputs=made.get(i, ()), at=i) for i in range(5))
    graph = Graph(ops=ops, tensors=tensors, saves=(), points=tuple(Point("op", i) for i in range(5)), device="cuda")
    allocator, step = Allocator(), _Step(graph, {}, lower(graph, ()))
    allocator.alloc(0, 24 * MIB)
    step.run(allocator)
    assert allocator.requested == 24 * MIB
    assert allocator._blocks[0].address == 24 * MIB, "in the segment of the activation, which comes after that of 24 MiB"
    assert reserved(graph, ()).requested_nbytes == simulate(graph, ()).predicted.peak_nbytes == 88 * MIB


def test_state_is_made_while_the_gradients_are_there() -> None:
    """The first update finds the memory of activations free, and not that of the gradients it reads."""
    spans = {"activation": (64, 0, 1), "gradient": (24, 1, 3), "state": (24, BEFORE, 3)}
    kinds = {"activation": "activation", "gradient": "gradient", "state": "optimizer_state"}
    tensors = tuple(
        Tensor(id=i, name=name, nbytes=nbytes * MIB, kind=kinds[name], storage=i, born_at=born_at, freed_at=freed_at)
        for i, (name, (nbytes, born_at, freed_at)) in enumerate(spans.items())
    )
    made: dict[int, tuple[int, ...]] = {0: (0,), 1: (1,)}
    phases = "forward", "backward", "update", "update"
    ops = tuple(Op(id=i, name="op", phase=phase, inputs=(), outputs=made.get(i, ()), at=i) for i, phase in enumerate(phases))
    graph = Graph(ops=ops, tensors=tensors, saves=(), points=tuple(Point("op", i) for i in range(4)), device="cuda")
    assert reserved(graph, ()).peak_nbytes == (64 + 64) * MIB, "the state is in the segment of the first step's activation"


# -- in the choice of a plan -------------------------------------------------------------------------------


def test_the_plan_within_a_budget_is_chosen_by_reserved_bytes() -> None:
    graph = chain(33 * MIB, layers=10)  # every tensor takes a segment of 34 MiB
    frontier = planner.solve(graph)
    assert planner.solve(replace(graph, device="cpu")).reserve is None and frontier.reserve is not None
    for budget in range(100 * MIB, 420 * MIB, 16 * MIB):
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            assert budget < frontier.smallest_nbytes == error.smallest_nbytes
            continue
        assert plan.predicted.peak_nbytes <= plan.predicted.reserved_nbytes <= budget
        assert plan.predicted.reserved_nbytes == reserved(graph, plan.lives).peak_nbytes == plan.predicted.needed_nbytes
    assert frontier.plan(frontier.smallest_nbytes).predicted.reserved_nbytes <= frontier.smallest_nbytes
    tight = frontier.unmodified_peak_nbytes + 4096
    assert frontier.plan(tight).predicted.rebuilt_ops > 0, "the unmodified step fits by allocated bytes, not by reserved ones"
    assert planner.solve(replace(graph, device="cpu")).plan(tight).predicted.rebuilt_ops == 0


@pytest.mark.parametrize("seed", range(6))
def test_what_is_chosen_is_within_the_budget_for_any_step(seed: int) -> None:
    graph = scaled(random_step(random.Random(seed), 14, mutation=True), 700 * 1024)
    frontier = planner.solve(graph)
    for share in (0.3, 0.6, 0.9, 1.0, 1.3):
        budget = int(frontier.smallest_nbytes + share * max(0, frontier.unmodified_peak_nbytes - frontier.smallest_nbytes))
        plan = frontier.plan(budget)
        assert plan.predicted.reserved_nbytes <= budget
