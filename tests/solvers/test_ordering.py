"""Order: valid sequences, peaks and bounds against every sequence of small problems."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memopt.errors import OrderingError
from lightning_memopt.solvers.ordering import Problem, excerpts, faults, order, search
from lightning_memopt.solvers.ordering.cuts import Cuts
from lightning_memopt.solvers.ordering.lists import KEYS, scheduled
from lightning_memopt.solvers.ordering.problem import BEFORE
from lightning_memopt.solvers.ordering.reach import Reach


def random_problem(seed: int, n: int, edges: float = 0.25) -> Problem:
    """Ops with random precedence; buffers with one maker and several users after it, some of which stay."""
    rng = random.Random(seed)
    before = [{o for o in range(op) if rng.random() < edges * 4 / (3 + op)} for op in range(n)]
    makers, users, sizes, stays = [], [], [], set()
    for op in range(n):
        for _ in range(rng.choice([0, 1, 1, 2])):
            readers = [o for o in range(op + 1, n) if rng.random() < 1.5 / (n - op)]
            for o in readers:
                before[o].add(op)
            if rng.random() < 0.1:
                stays.add(len(makers))
            makers.append(op)
            users.append(tuple(readers))
            sizes.append(rng.randint(0, 12))
    for _ in range(2):
        makers.append(BEFORE)
        users.append((rng.randrange(n),))
        sizes.append(rng.randint(1, 12))
    return Problem(
        before=tuple(tuple(sorted(ops)) for ops in before), makers=tuple(makers), users=tuple(users), nbytes=tuple(sizes),
        workspace=tuple(rng.choice([0, 0, 5]) for _ in range(n)), stays=frozenset(stays),
        resident_nbytes=rng.randint(0, 9),
    )  # fmt: skip


def level(problem: Problem, ran: frozenset[int], op: int) -> int:
    """Bytes while an op runs, behind a set of ops."""
    total = problem.resident_nbytes + problem.workspace[op]
    for buffer, maker in enumerate(problem.makers):
        made = maker in ran or maker in (op, BEFORE)
        over = maker != op and buffer not in problem.stays and set(problem.users[buffer]) <= ran
        total += problem.nbytes[buffer] if made and not over else 0
    return total


def states(problem: Problem) -> list[tuple[frozenset[int], int]]:
    """Every set of ops that may have run, with every op that may run then."""
    seen, waiting, pairs = {frozenset[int]()}, [frozenset[int]()], []
    while waiting:
        ran = waiting.pop()
        for op in set(range(len(problem))) - ran:
            if set(problem.before[op]) <= ran:
                pairs.append((ran, op))
                if ran | {op} not in seen:
                    seen.add(ran | {op})
                    waiting.append(ran | {op})
    return pairs


def lowest(problem: Problem) -> int:
    """The least peak over all sequences, by the sets of ops that have run."""
    everything = frozenset(range(len(problem)))

    @cache
    def best(ran: frozenset[int]) -> int:
        if ran == everything:
            return problem.resident_nbytes
        ready = [op for op in everything - ran if set(problem.before[op]) <= ran]
        return min(max(level(problem, ran, op), best(ran | {op})) for op in ready)

    return best(frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_small_problems_are_as_low_as_exhaustive_search(seed: int) -> None:
    problem = random_problem(seed, n=5 + seed % 6)
    result = order(problem, seconds=5)
    assert not faults(problem, result.sequence, result.peak_nbytes)
    assert Reach(problem).bound_nbytes <= result.bound_nbytes <= lowest(problem) == result.peak_nbytes
    assert result.peak_nbytes <= result.given_nbytes


@pytest.mark.parametrize("seed", range(25))
def test_a_cut_is_the_fewest_bytes_at_an_op(seed: int) -> None:
    """Over all sequences, by every set of ops that may have run; the quick bound is not above it."""
    problem = random_problem(seed, n=4 + seed % 6)
    reach = Reach(problem)
    cuts = Cuts(problem, reach)
    least: dict[int, int] = {}
    for ran, op in states(problem):
        least[op] = min(least.get(op, 1 << 60), level(problem, ran, op))
    for op in range(len(problem)):
        cut = cuts.at(op)
        assert reach.bounds_nbytes[op] <= cut.nbytes == least[op]
        first, late = cut.applied(range(len(problem)))
        sequence = [*first, op, *late]
        assert not faults(problem, sequence)
        assert problem.levels_nbytes(sequence)[len(first)] == cut.nbytes


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_valid(seed: int, n: int) -> None:
    problem = random_problem(seed, n)
    start = list(range(n))
    sequences = [scheduled(problem, start, key) for key in KEYS.values()]
    reach = Reach(problem)
    for sequence in sequences:
        assert not faults(problem, sequence, problem.peak_nbytes(sequence))
        assert (problem.levels_nbytes(sequence) >= reach.bounds_nbytes[sequence]).all()


@pytest.mark.parametrize("seed", range(8))
def test_an_excerpt_is_as_low_as_exhaustive_search(seed: int) -> None:
    problem = random_problem(seed, n=9)
    whole = excerpts.solved(problem, range(9), 0, 9, 0, seconds=5, workers=1)
    assert whole.proven and problem.peak_nbytes(whole.sequence) == lowest(problem)
    part = excerpts.solved(problem, range(9), 3, 7, 0, seconds=5, workers=1)
    assert part.sequence[:3] == [0, 1, 2] and part.sequence[7:] == [7, 8] and not faults(problem, part.sequence)
    fixed = replace(problem, before=tuple(_fixed(op, ops) for op, ops in enumerate(problem.before)))
    # the peak of the excerpt alone is what it minimises
    assert max(problem.levels_nbytes(part.sequence)[3:7]) == _lowest_between(fixed)


def _fixed(op: int, ops: tuple[int, ...]) -> tuple[int, ...]:
    """Ops before 3 and from 7 on stay where they are; those between follow and precede them."""
    if op < 3:
        return tuple(range(op))
    return tuple({*ops, 0, 1, 2}) if op < 7 else tuple(range(op))


def _lowest_between(problem: Problem) -> int:
    @cache
    def best(ran: frozenset[int]) -> int:
        ready = [op for op in range(3, 7) if op not in ran and set(problem.before[op]) <= ran]
        return min((max(level(problem, ran, op), best(ran | {op})) for op in ready), default=0)

    return best(frozenset({0, 1, 2}))


@pytest.mark.parametrize("seed", range(30))
def test_the_exact_search_reaches_what_exists_and_proves_what_does_not(seed: int) -> None:
    problem = random_problem(seed, n=4 + seed % 6)
    n, least = len(problem), lowest(problem)
    reached = search.within(problem, range(n), 0, n, least, 10**5, math.inf)
    assert reached.sequence is not None and not faults(problem, reached.sequence, least)
    assert search.within(problem, range(n), 0, n, least - 1, 10**5, math.inf) == (None, True)
    assert search.within(problem, range(n), 0, n, least - 1, -1, math.inf).proven is False


def test_the_exact_search_leaves_ops_outside_of_the_excerpt_where_they_are() -> None:
    for seed in range(12):
        problem = random_problem(seed, n=9)
        fixed = replace(problem, before=tuple(_fixed(op, ops) for op, ops in enumerate(problem.before)))
        least = _lowest_between(fixed)
        answer = search.within(problem, range(9), 3, 7, least, 10**4, math.inf)
        assert answer.sequence is not None and not faults(problem, answer.sequence)
        assert max(problem.levels_nbytes(answer.sequence)[3:7]) == least
        assert search.within(problem, range(9), 3, 7, least - 1, 10**4, math.inf).proven


def network(layers: int, weight: int = 10, activation: int = 3) -> Problem:
    """Forward, backward, and one update a layer at the end: op 2 * layers + k updates layer k."""
    before: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(2 * layers)]
    makers, users, sizes = [], [], []
    for i in range(layers):  # the activation is read by the next layer and by its own backward
        makers.append(i)
        users.append(tuple(sorted({i + 1, 2 * layers - 1 - i})))
        sizes.append(activation)
    for k in range(layers):
        backward = 2 * layers - 1 - k
        before.append((backward,))
        makers.append(backward)
        users.append((2 * layers + k,))
        sizes.append(weight)
    n = 3 * layers
    return Problem(before=tuple(before), makers=tuple(makers), users=tuple(users), nbytes=tuple(sizes), workspace=(0,) * n)


def test_a_cut_proves_more_than_ancestors_and_descendants() -> None:
    """Two branches that are joined: each op is unrelated to the other branch, which has to be somewhere."""
    # ops: 0 and 1 begin the branches, 2 and 3 end them; 4 joins. What 0 and 1 make is large, what 2 and 3 make half of it
    problem = Problem(
        before=((), (), (0,), (1,), (2, 3)), makers=(0, 1, 2, 3), users=((2,), (3,), (4,), (4,)), nbytes=(10, 10, 5, 5),
        workspace=(0,) * 5,
    )  # fmt: skip
    result = order(problem, seconds=5)
    assert int(Reach(problem).bounds_nbytes.max()) == 15 and result.given_nbytes == 25
    assert result.peak_nbytes == lowest(problem) == 20


def test_a_wrong_sequence_has_faults() -> None:
    problem = network(3)
    right = list(range(9))
    assert not faults(problem, right, problem.peak_nbytes(right))
    assert faults(problem, right[1:]) and faults(problem, [1, 0, *right[2:]]) == ["op 1 runs before op 0"]
    assert "not 7" in faults(problem, right, 7)[0]


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(OrderingError, match="positive number of seconds"):
        order(network(2), seconds=0)
    with pytest.raises(OrderingError, match="number the ops"):
        Problem(before=((1,), ()), makers=(), users=(), nbytes=(), workspace=(0, 0))
    with pytest.raises(OrderingError, match="give one of each"):
        Problem(before=((),), makers=(0,), users=(), nbytes=(), workspace=(0,))
    with pytest.raises(OrderingError, match=r"buffer 0 is made by 2 and used by \(\); give ops below 2"):
        Problem(before=((), ()), makers=(2,), users=((),), nbytes=(1,), workspace=(0, 0))
    with pytest.raises(OrderingError, match="before 1 makes it"):
        Problem(before=((), ()), makers=(1,), users=((0,),), nbytes=(1,), workspace=(0, 0))
    with pytest.raises(OrderingError, match="leave it out"):
        Problem(before=((),), makers=(BEFORE,), users=((),), nbytes=(1,), workspace=(0,))


def test_a_step_without_ops_has_its_resident_bytes() -> None:
    result = order(Problem(before=(), makers=(), users=(), nbytes=(), workspace=(), resident_nbytes=7), seconds=1)
    assert (result.peak_nbytes, result.bound_nbytes, result.sequence, result.gap) == (7, 7, (), 0.0)
