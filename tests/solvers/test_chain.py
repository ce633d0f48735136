"""The chain solver against an independent search, closed forms and its own interpreter of schedules."""

from __future__ import annotations

import inspect
import math
import random
import sys
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from chain_exhaustive import unrestricted_seconds

from lightning_memopt.errors import ChainError, InfeasibleError
from lightning_memopt.solvers.chain import (
    Chain,
    Hold,
    Option,
    Rebuild,
    Stage,
    minimum_budget,
    operations,
    simulate,
    simulate_operations,
    smallest_tree,
    solve_chain,
)
from lightning_memopt.solvers.chain import table as chain_table


def random_chain(rng: random.Random, length: int, most_options: int = 2, unit: int = 1) -> Chain:
    """Heterogeneous stages with small whole numbers, including zeros."""
    sizes = [rng.randint(0, 6) * unit for _ in range(length)]
    stages = []
    for k in range(length):
        least = 1 if k == length - 1 else 0
        options = tuple(
            Option(
                name=f"option {i}",
                held_nbytes=rng.randint(0, 8) * unit,
                rerun_seconds=rng.randint(0, 9),
                rebuild_seconds=rng.randint(0, 6),
                forward_peak_nbytes=rng.randint(0, 12) * unit,
                backward_peak_nbytes=rng.randint(0, 16) * unit,
            )
            for i in range(rng.randint(least, most_options))
        )
        stages.append(
            Stage(
                name=f"stage {k}",
                input_nbytes=sizes[k],
                sweep_seconds=rng.randint(0, 9),
                sweep_peak_nbytes=rng.randint(0, 10) * unit,
                rebuild_seconds=rng.randint(0, 12),
                rebuild_peak_nbytes=rng.randint(0, 16) * unit,
                forward_base_nbytes=rng.randint(0, 4) * unit,
                backward_base_nbytes=rng.randint(0, 6) * unit,
                options=options,
            )
        )
    return Chain(tuple(stages))


def most_useful_nbytes(chain: Chain) -> int:
    """More than any schedule can use."""
    return sum(
        s.input_nbytes
        + s.sweep_peak_nbytes
        + s.rebuild_peak_nbytes
        + s.forward_base_nbytes
        + s.backward_base_nbytes
        + sum(o.held_nbytes + o.forward_peak_nbytes + o.backward_peak_nbytes for o in s.options)
        for s in chain.stages
    )


def search(chain: Chain, budget: int) -> float:
    """Least extra seconds by walking every state: what each stage keeps (0 nothing, 1 its input, 2+o option o), where
    the sweep is (-1: nowhere), which backward is due. Written without intervals, tables or buckets."""
    stages, last = chain.stages, len(chain.stages) - 1

    @cache
    def go(due: int, kept: tuple[int, ...], at: int) -> float:
        if due < 0:
            return 0
        inside = sum(s.input_nbytes for s, mode in zip(stages, kept, strict=True) if mode)
        inside += sum(s.options[mode - 2].held_nbytes for s, mode in zip(stages, kept, strict=True) if mode > 1)
        if at < 0:
            if kept[due] > 1:
                option = stages[due].options[kept[due] - 2]
                if inside - option.held_nbytes + option.backward_peak_nbytes > budget:
                    return math.inf
                return option.rebuild_seconds + go(due - 1, (*kept[:due], 0, *kept[due + 1 :]), -1)
            return go(due, kept, max(k for k in range(due + 1) if kept[k]))
        stage = stages[at]
        inside += 0 if kept[at] else stage.input_nbytes
        base = stage.forward_base_nbytes if due == last else stages[due].backward_base_nbytes
        free = due == last
        found = [math.inf]
        if at == due:
            after = go(due - 1, (*kept[:at], 0, *kept[at + 1 :]), -1)
            if not free and inside + stage.rebuild_peak_nbytes <= budget:
                found.append(stage.rebuild_seconds + after)
            for o in stage.options:
                if inside + max(base + o.forward_peak_nbytes, o.backward_peak_nbytes) <= budget:
                    found.append(o.rebuild_seconds + (0 if free else o.rerun_seconds) + after)
            return min(found)
        if inside + base + stage.sweep_peak_nbytes <= budget:
            cost = 0 if free else stage.sweep_seconds
            for mode in {kept[at], 1}:
                found.append(cost + go(due, (*kept[:at], mode, *kept[at + 1 :]), at + 1))
        for index, o in enumerate(stage.options):
            if inside + base + o.forward_peak_nbytes <= budget:
                now = (*kept[:at], 2 + index, 1, *kept[at + 2 :])
                found.append((0 if free else o.rerun_seconds) + go(due, now, at + 1))
        return min(found)

    return go(last, (1,) + (0,) * last, -1)


def bound_blocks(monkeypatch: pytest.MonkeyPatch, block: int, windows: int) -> None:
    """Leave out positions by bounds in tables of any size, in small blocks and small batches."""
    monkeypatch.setattr(chain_table, "_UNBOUNDED", 0)
    monkeypatch.setattr(chain_table, "_BLOCK", block)
    monkeypatch.setattr(chain_table, "_WINDOWS", windows)


@pytest.mark.parametrize(("length", "chains"), [(1, 20), (2, 80), (3, 180), (4, 150), (5, 60), (6, 25), (8, 3)])
def test_equals_search_over_every_state(length: int, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(length)
    for index in range(chains):
        chain = random_chain(rng, length)
        smallest = minimum_budget(chain)
        budget = smallest + rng.choice([0, 1, rng.randint(0, 6), rng.randint(0, 10 * length)])
        if index % 2:
            bound_blocks(monkeypatch, block=4, windows=3)
        table = solve_chain(chain, budget, bucket_nbytes=1)
        monkeypatch.undo()
        for level in {budget, max(0, smallest - 1), rng.randint(0, budget)}:
            expected = search(chain, level)
            assert table.seconds(level) == expected
            if expected < math.inf:
                seconds, peak = simulate(chain, table.tree(level))
                assert seconds == expected
                assert peak <= level


def revolve_steps(length: int, slots: int) -> int:
    """Griewank's r * l - C(slots + r, slots + 1), r the least with C(slots + r, slots) >= l: steps of the optimum."""
    r = 0
    while math.comb(slots + r, slots) < length:
        r += 1
    return r * length - math.comb(slots + r, slots + 1)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20, 30])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_uniform_chain_is_revolve(length: int, slots: int) -> None:
    # One more unit than slots: the boundary at hand is counted here and not in Revolve.
    unheld = Option(
        name="unheld",
        held_nbytes=10**6,
        rerun_seconds=0,
        rebuild_seconds=0,
        forward_peak_nbytes=0,
        backward_peak_nbytes=0,
    )
    stage = Stage(
        name="step",
        input_nbytes=1,
        sweep_seconds=1,
        sweep_peak_nbytes=0,
        rebuild_seconds=0,
        rebuild_peak_nbytes=0,
        forward_base_nbytes=0,
        backward_base_nbytes=0,
        options=(unheld,),
    )
    table = solve_chain(Chain((stage,) * length), slots + 1, bucket_nbytes=1)
    assert table.seconds(slots + 1) + (length - 1) == revolve_steps(length, slots)


def test_minimum_budget_is_exact() -> None:
    rng = random.Random(7)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(1, 9))
        smallest = minimum_budget(chain)
        table = solve_chain(chain, smallest, bucket_nbytes=1)
        assert table.seconds(smallest) < math.inf
        assert smallest == 0 or table.seconds(smallest - 1) == math.inf
        assert table.levels()[0] == smallest
        assert simulate(chain, smallest_tree(chain))[1] == smallest


def test_every_level_of_one_table() -> None:
    rng = random.Random(11)
    for _ in range(12):
        chain = random_chain(rng, rng.randint(3, 12), most_options=3)
        budget = most_useful_nbytes(chain)
        table = solve_chain(chain, budget, bucket_nbytes=1)
        costs = [table.seconds(level) for level in range(budget + 1)]
        assert all(more <= less for less, more in pairwise(costs))
        steps = [i for i in range(budget + 1) if costs[i] < (costs[i - 1] if i else math.inf)]
        assert table.levels() == tuple(steps)
        for level in table.levels():
            seconds, peak = simulate(chain, table.tree(level))
            assert seconds == table.seconds(level)
            assert peak == level  # a level is where the cost changes, so its schedule uses all of it


@pytest.mark.parametrize("bucket", [3, 10, 64, 1000])
def test_coarse_buckets_are_safe(bucket: int) -> None:
    rng = random.Random(bucket)
    for _ in range(15):
        chain = random_chain(rng, rng.randint(2, 8), unit=rng.choice([7, 31, 100]))
        budget = minimum_budget(chain) + rng.randint(0, 3000)
        coarse, fine = solve_chain(chain, budget, bucket_nbytes=bucket), solve_chain(chain, budget, bucket_nbytes=1)
        for level in (budget, budget // 2, *coarse.levels()):
            if coarse.seconds(level) < math.inf:
                seconds, peak = simulate(chain, coarse.tree(level))
                assert seconds == coarse.seconds(level) >= fine.seconds(level)
                assert peak <= level
            else:
                with pytest.raises(InfeasibleError, match="minimum_budget"):
                    coarse.tree(level)


def test_float32_table_reports_exact_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    chain = random_chain(rng, 30, most_options=3)
    budget = minimum_budget(chain) + 60
    exact = solve_chain(chain, budget, bucket_nbytes=1)
    monkeypatch.setattr(chain_table, "FLOAT64_NBYTES", 0)
    single = solve_chain(chain, budget, bucket_nbytes=1)
    assert single.dtype == np.float32
    assert single.levels() == exact.levels()
    assert [single.seconds(level) for level in single.levels()] == [exact.seconds(level) for level in exact.levels()]


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(17)
    for length, block, windows in ((9, 4, 8), (16, 8, 20), (23, 16, 64), (30, 64, 2048)):
        chain = random_chain(rng, length, most_options=3)
        budget = minimum_budget(chain) + 90
        usual = solve_chain(chain, budget, bucket_nbytes=1)
        bound_blocks(monkeypatch, block, windows)
        split = solve_chain(chain, budget, bucket_nbytes=1)
        monkeypatch.undo()
        assert [split.seconds(i) for i in range(budget + 1)] == [usual.seconds(i) for i in range(budget + 1)]


def test_deep_schedules_need_no_recursion() -> None:
    chain = random_chain(random.Random(5), 75)
    table = solve_chain(chain, minimum_budget(chain) + 60, bucket_nbytes=2)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        schedules = [smallest_tree(chain), *(table.tree(level) for level in table.levels()[::30])]
        costs = [simulate(chain, schedule) for schedule in schedules]
        assert repr(schedules[0])
    finally:
        sys.setrecursionlimit(limit)
    assert costs[0][1] == minimum_budget(chain)
    assert [seconds for seconds, _ in costs[1:]] == [table.seconds(level) for level in table.levels()[::30]]


def test_unrestricted_is_never_worse() -> None:
    rng = random.Random(13)
    for _ in range(20):
        chain = random_chain(rng, rng.randint(2, 4), most_options=1)
        budget = minimum_budget(chain) + rng.randint(0, 5)
        assert unrestricted_seconds(chain, budget) <= solve_chain(chain, budget, bucket_nbytes=1).seconds(budget)


def test_event_log_of_one_schedule() -> None:
    chain = random_chain(random.Random(1), 3, most_options=1)
    whole = operations(Hold(0, 0, Hold(1, 0, Hold(2, 0, None))))
    assert whole == [("hold", k, 0) for k in range(3)] + [("backward", k) for k in (2, 1, 0)]
    with pytest.raises(ChainError, match="next backward is that of stage 2"):
        simulate_operations(chain, [("backward", 0)])
    with pytest.raises(ChainError, match="stage 2 comes after stage 1, whose backward is next"):
        simulate_operations(chain, [("keep", 0), ("keep", 1), ("hold", 2, 0), ("backward", 2), ("keep", 1), ("hold", 2, 0)])
    with pytest.raises(ChainError, match="stages 0..2 not done"):
        simulate_operations(chain, [])
    with pytest.raises(ChainError, match="user's own forward"):
        simulate(Chain(chain.stages[2:]), Rebuild(0))


def test_refusals() -> None:
    with pytest.raises(ChainError, match="at least one stage"):
        Chain(())
    stage = random_chain(random.Random(2), 1).stages[0]
    changed = {name: getattr(stage, name) for name in stage.__slots__}
    for key, value in [
        ("input_nbytes", -1),
        ("sweep_seconds", math.nan),
        ("sweep_seconds", math.inf),
        ("input_nbytes", 1.5),
        ("options", ()),
    ]:
        with pytest.raises(ChainError, match="stage 0"):
            Chain((Stage(**{**changed, key: value}),))
    chain = Chain((stage,))
    with pytest.raises(ChainError, match="budget -1"):
        solve_chain(chain, -1)
    with pytest.raises(ChainError, match="above the budget 10"):
        solve_chain(chain, 10).seconds(11)
