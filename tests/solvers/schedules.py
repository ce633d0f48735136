"""Schedules that need no solver, to compare a plan with: each is a schedule tree, judged by `simulate`.

`baselines(data)` gives (total seconds, peak bytes) of each by name. All are memory-persistent schedules over F_all, so
the optimum at a baseline's own peak is never worse than the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_memopt.solvers.chain import Checkpoint, CheckpointTree, Hold, Rebuild, simulate
from lightning_memopt.solvers.chain.by_numbers import base_seconds, chain_from_dict


def keep_all(length: int) -> CheckpointTree:
    """Hold every stage: what the framework does."""
    return _held(0, length - 1)


def every_boundary(length: int) -> CheckpointTree:
    """Keep every boundary and nothing else; each stage but the last is run again before its backward."""
    return periodic(length, 1)


def square_root(length: int) -> CheckpointTree:
    """Keep every ceil(sqrt(N))-th boundary; replay a segment once, holding all of it (Chen et al., 2016)."""
    return periodic(length, math.isqrt(length - 1) + 1)


def periodic(length: int, period: int) -> CheckpointTree:
    """Keep the boundaries 0, period, 2 * period, ...; the last segment is held by the user's own forward."""
    starts = list(range(0, length, period))
    tree = _held(starts[-1], length - 1)
    for first, at in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        left = Rebuild(first) if at == first + 1 else _held(first, at - 1)
        tree = Checkpoint(first, at, tree, left)
    return tree


def from_input(length: int) -> CheckpointTree:
    """Keep the chain's input only, and replay from it for every backward: quadratic seconds."""
    tree: CheckpointTree = Rebuild(0) if length > 1 else Hold(0, 0, None)
    for t in range(1, length):
        tree = Checkpoint(0, t, Hold(t, 0, None) if t == length - 1 else Rebuild(t), tree)
    return tree


def _held(first: int, last: int) -> CheckpointTree:
    tree: CheckpointTree = Hold(last, 0, None)
    for stage in range(last - 1, first - 1, -1):
        tree = Hold(stage, 0, tree)
    return tree


BASELINES = {
    "keep-all": keep_all,
    "every-boundary": every_boundary,
    "square-root": square_root,
    "from-input": from_input,
}


def baselines(data: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """(total seconds, peak bytes) of every baseline of the sequence."""
    chain = chain_from_dict(data)
    base = base_seconds(data)
    found = {}
    for name, build in BASELINES.items():
        extra_seconds, peak_nbytes = simulate(chain, build(len(chain.stages)))
        found[name] = (base + extra_seconds, peak_nbytes)
    return found
