"""Local search: its prices are the simulator's, its plans are valid, within the limit, and better than those it begins at."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from graphs import random_steps, step, training_step

from benchmarks.robustness.fuzzing.plans import random_lives
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, lower, simulate, validate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute import bound, local_search
from lightning_memopt.solvers.recompute.draft import Change, Draft
from lightning_memopt.solvers.rollout import keep_all

SEEDS = range(12)


def random_graph(seed: int, count: int = 25) -> Graph:
    """A random step; each third op draws numbers, so that a rebuild keeps the generator's state."""
    graph = training_step(random_steps(random.Random(seed), count))
    drawing = (replace(op, state_nbytes=5 if op.recomputable and op.id % 3 == 0 else 0) for op in graph.ops)
    return replace(graph, ops=tuple(drawing))


def changes(draft: Draft) -> Iterator[Change]:
    """All changes that a walk would look at, from any point."""
    for at in range(len(draft.graph.points)):
        yield from local_search._drops(draft, at, wide=True)
    for tensor, _, lives in local_search._keeps(draft, 1 << 60):
        change = draft.change({tensor: lives})
        if change is not None:
            yield change


def changed(draft: Draft, change: Change) -> list[Life]:
    others = [life for life in draft.lives if life.tensor not in change.lives]
    return sorted([*others, *itertools.chain(*change.lives.values())], key=lambda life: (life.tensor, life.born_at))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_costs_what_the_simulator_says(seed: int) -> None:
    graph = random_graph(seed)
    looked_at = 0
    for plan in range(4):
        draft = Draft(graph, random_lives(graph, random.Random(plan), held=0.3))
        before = simulate(graph, draft.lives)
        assert tuple(draft.nbytes) == before.nbytes
        assert draft.seconds == pytest.approx(before.predicted.extra_seconds)
        for change in changes(draft):
            after = simulate(graph, changed(draft, change))
            assert tuple(change.nbytes) == after.nbytes
            assert before.predicted.extra_seconds + change.extra_seconds == pytest.approx(after.predicted.extra_seconds)
            looked_at += 1
        assert tuple(draft.nbytes) == before.nbytes, "a change that is only priced changes nothing"
    assert looked_at > 20


@pytest.mark.parametrize("thorough", [False, True])
def test_no_walk_begins_at_a_plan_that_the_graph_does_not_have(thorough: bool) -> None:
    """Weights that are away make solvers hold what they rebuild elsewhere; plans that were made before may rebuild it."""
    graph = random_graph(1)
    smallest, largest = random_lives(graph, random.Random(0), held=0.0), keep_all(graph)
    rebuilt = {
        op
        for steps in lower(graph, smallest).segments.values()
        for each in steps
        if (op := getattr(each, "op", None)) is not None
    }
    held = replace(graph, ops=tuple(replace(op, recomputable=op.recomputable and op.id not in rebuilt) for op in graph.ops))
    with pytest.raises(LoweringError):
        lower(held, smallest)
    limit = simulate(held, largest).predicted.peak_nbytes
    for lives in local_search.within(held, [smallest, largest], 1, limit, thorough=thorough):
        assert validate(held, lives, lower(held, lives)).ok


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_of_a_walk_is_a_plan_and_goes_on(seed: int, wide: bool) -> None:
    """Down: the peak falls, or it is as high at fewer points. Up: the plan takes less time, within the limit."""
    graph = random_graph(seed)
    before = Draft(graph, random_lives(graph, random.Random(seed), held=0.3))
    for after in local_search.Walks(graph, wide=wide).down(before):
        assert validate(graph, after.lives, lower(graph, after.lives)).ok
        assert after.peak_nbytes <= before.peak_nbytes
        assert after.nbytes[before.peak_at] < before.peak_nbytes
        before = after
    limit = int(1.2 * before.peak_nbytes)
    for after in local_search.Walks(graph).up(before, limit):
        assert validate(graph, after.lives, lower(graph, after.lives)).ok
        assert after.peak_nbytes <= limit and after.seconds < before.seconds
        before = after


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_within_the_limit_and_above_the_bound(seed: int) -> None:
    graph = random_graph(seed)
    plans = [candidate.lives for candidate in planner.solve(graph).candidates]
    peaks = [simulate(graph, lives).predicted.peak_nbytes for lives in plans]
    moments = bound.moments(graph)
    for limit in range(peaks[0], peaks[-1], max(1, (peaks[-1] - peaks[0]) // 6)):
        fitting = sum(peak <= limit for peak in peaks)
        last = float("inf")
        for lives in local_search.within(graph, plans, fitting, limit, thorough=True):
            predicted = simulate(graph, lives).predicted
            assert validate(graph, lives, lower(graph, lives)).ok
            assert predicted.peak_nbytes <= limit
            assert predicted.extra_seconds < last
            assert predicted.extra_seconds >= max(m.bound_seconds(limit) for m in moments) - 1e-9
            last = predicted.extra_seconds


def large(seed: int) -> Graph:
    """Tensors of up to 4 MiB: a plan must save more than the margin that it leaves."""
    graph = random_graph(seed)
    return replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 16) for t in graph.tensors))


def test_plans_for_a_budget_are_faster_than_those_of_the_other_solvers() -> None:
    """Never slower; in the sum of random steps and budgets, a quarter of the extra time goes away."""
    alone = searched = 0.0
    for graph in map(large, range(4)):
        frontier = planner.solve(graph)
        least, most = frontier.smallest_nbytes, frontier.unmodified_peak_nbytes
        for budget in range(least, most, (most - least) // 4 + 1):
            plans = [f.plan(budget) for f in (frontier, planner.solve(graph, budgets=[budget]))]
            assert plans[1].predicted.seconds <= plans[0].predicted.seconds
            assert plans[1].predicted_peak_nbytes <= budget
            alone += plans[0].predicted.seconds
            searched += plans[1].predicted.seconds
    assert searched < 0.75 * alone, f"{searched} of {alone} seconds"


def fanning() -> Graph:
    """A large tensor at the end of a row of costly small ones, of which autograd saves none. Kept, the last of them is enough
    to make the large one again.
    """
    steps = [step(f"small{i}", reads=[f"small{i - 1}" if i else "input"], nbytes=2, seconds=8.0) for i in range(4)]
    steps += [step("large", reads=["small3"], saves=["large"], nbytes=40, seconds=1.0)]
    steps += [step("wide", reads=["large"], saves=["wide"], nbytes=40, seconds=99.0)]
    return training_step([*steps, step("last", reads=["wide"], saves=["last"], nbytes=2, seconds=99.0)])


def test_a_wide_walk_holds_what_a_rebuild_starts_from() -> None:
    """A narrow walk runs the whole row again."""
    graph = fanning()
    unmodified = Draft(graph, keep_all(graph))
    narrow, wide = (next(local_search.Walks(graph, wide=wide).down(unmodified)) for wide in (False, True))
    assert narrow.seconds == 33.0 and wide.seconds == 1.0
    assert wide.peak_nbytes < unmodified.peak_nbytes


def test_a_thorough_search_is_never_slower_and_finds_more() -> None:
    """In the sum of random steps and budgets."""
    usual = thorough = 0.0
    for graph in map(large, range(6)):
        frontier = planner.solve(graph)
        least, most = frontier.smallest_nbytes, frontier.unmodified_peak_nbytes
        for budget in range(least, most, (most - least) // 4 + 1):
            plans = [planner.solve(graph, budgets=[budget], thorough=t).plan(budget) for t in (False, True)]
            assert plans[1].predicted.seconds <= plans[0].predicted.seconds and plans[1].predicted_peak_nbytes <= budget
            usual += plans[0].predicted.seconds
            thorough += plans[1].predicted.seconds
    assert thorough < usual


def crossing() -> Graph:
    """Two long skips over small tensors, as in a U-Net: `skip` and `large` are read by the last op alone, and both are there at
    the peak, the wide op in the middle, whose own backward comes between.
    """
    steps = [step("skip", reads=["input"], saves=["skip"], nbytes=40, seconds=1.0)]
    steps += [step(f"down{i}", reads=["skip" if i == 0 else f"down{i - 1}"], saves=[f"down{i}"], nbytes=4) for i in range(4)]
    steps += [step("wide", reads=["down3"], saves=["wide"], nbytes=60, seconds=9.0)]
    steps += [step("up", reads=["wide"], saves=["up"], nbytes=4), step("last", reads=["up", "skip"], saves=["last"], nbytes=8)]
    return training_step(steps)


def test_a_walk_down_drops_what_is_cheap_at_the_peak() -> None:
    """The skip takes one second to rebuild and the wide tensor nine: the skip goes."""
    graph = crossing()
    unmodified = Draft(graph, planner.keep_all(graph))
    walks = local_search.Walks(graph)
    down = next(walks.down(unmodified))
    dropped = {graph.tensors[life.tensor].name for life in down.lives if life.how == "rebuild"}
    assert dropped == {"skip"} and down.peak_nbytes < max(unmodified_levels(graph))


def test_a_walk_up_keeps_what_there_is_room_for() -> None:
    """With room for everything, nothing is rebuilt in the end."""
    for seed in SEEDS:
        graph = random_graph(seed)
        lives = random_lives(graph, random.Random(seed), held=0.0)
        walks = local_search.Walks(graph)
        *_, up = [Draft(graph, lives), *walks.up(Draft(graph, lives), 1 << 60)]
        assert up.seconds == pytest.approx(simulate(graph, planner.keep_all(graph)).predicted.extra_seconds)


def test_the_work_is_limited_by_a_count() -> None:
    graph = random_graph(0)
    walks = local_search.Walks(graph)
    walks.left = 2
    assert len(list(walks.down(Draft(graph, planner.keep_all(graph))))) <= 2 and walks.left == 0


def test_the_smallest_plan_is_smaller_than_that_of_the_other_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [large(seed) for seed in range(8)]
    with_search = [planner.smallest_nbytes(graph) for graph in graphs]
    monkeypatch.setattr(local_search, "smaller", lambda graph, plans: None)
    without = [planner.smallest_nbytes(graph) for graph in graphs]
    assert all(a <= b for a, b in zip(with_search, without, strict=True))
    assert sum(with_search) < sum(without)


def test_the_smallest_plan_is_searched_for_as_long_as_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk makes fewer plans for tiny ops than for the same ops if each takes long: a count, and no clock."""
    made = []
    init = Draft.__init__
    monkeypatch.setattr(Draft, "__init__", lambda self, *args: made.append(1) or init(self, *args))
    monkeypatch.setattr(local_search, "_WORTH_SECONDS", 1e-3)
    graph = random_graph(1, count=60)
    counts = []
    for seconds in (1e-6, 1.0):
        timed = replace(graph, ops=tuple(replace(op, seconds=seconds) for op in graph.ops))
        made.clear()
        local_search.smaller(timed, [keep_all(timed)])
        counts.append(len(made))
    few, many = counts
    assert 2 * few <= many
