"""The next order of buffers: those above the target are placed earlier."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_memopt.solvers.placement import Buffer, best_fit
from lightning_memopt.solvers.placement.buffers import Problem
from lightning_memopt.solvers.placement.promotion import _promoted


@pytest.mark.parametrize("seed", range(30))
def test_those_above_the_target_come_first_in_the_order_that_they_had(seed: int) -> None:
    """Before the last of them are at most a fifth of the others, and some that share moments with one of them."""
    rng = np.random.default_rng(seed)
    lower, size = rng.integers(0, 20, 40), rng.integers(1, 9, 40)
    problem = Problem.of([Buffer(str(i), int(a), int(a) + 4, int(n)) for i, (a, n) in enumerate(zip(lower, size, strict=True))])
    order = rng.permutation(40)
    offsets = best_fit.best_fit(problem, order)
    target = problem.height_nbytes(offsets) - 4
    above = set(np.flatnonzero(offsets + problem.size > target).tolist())
    after = _promoted(problem, order, offsets, target, rng).tolist()
    assert sorted(after) == list(range(40)) and 0 < len(above) < 20
    assert [i for i in after if i in above] == [i for i in order.tolist() if i in above]
    touching = {i for i in range(40) if any(lower[i] < lower[j] + 4 and lower[j] < lower[i] + 4 for j in above)}
    last = max(map(after.index, above))
    assert len([i for i in after[:last] if i not in touching]) <= 0.2 * 40
    assert [i for i in after if i not in touching] == [i for i in order.tolist() if i not in touching]
