"""Policies of recomputation that only benchmarks and tests compare with, as solvers of the same shape as any other.

Input: an observed graph (and its stages where the policy speaks of layers). Output: lives. No policy looks at bytes.
Sources: Chen, Xu, Zhang, Guestrin, *Training deep nets with sublinear memory cost* (2016) for the segments of `sqrt_n`;
`per_stage` is checkpointing of every block; `all_light` is Echo (ISCA 2020) without its analysis of what pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.recompute.echo import just_in_time
from lightning_memopt.solvers.recompute.footprint import Footprint
from lightning_memopt.solvers.recompute.stages import Stages, StageSpan, cut
from lightning_memopt.solvers.rollout import Rollout


def all_light(graph: Graph) -> tuple[Life, ...]:
    """Run every light op again, for the backward of heavy ops too: Echo before it takes back what does not pay."""
    return just_in_time(Footprint(graph))


def per_stage(graph: Graph, stages: Stages | None = None) -> tuple[Life, ...]:
    """Hold what enters each stage and rebuild the stage when its backward begins."""
    stages = stages or cut(graph)
    return _segments(stages, range(len(stages.spans)))


def sqrt_n(graph: Graph, stages: Stages | None = None) -> tuple[Life, ...]:
    """Hold every ceil(sqrt(L))-th boundary of L stages; a segment runs once more, when its backward begins."""
    stages = stages or cut(graph)
    count = len(stages.spans)
    return _segments(stages, range(0, count, math.isqrt(max(count - 1, 0)) + 1))


def _segments(stages: Stages, firsts: Iterable[int]) -> tuple[Life, ...]:
    """Segments begin at the stages `firsts`: hold what enters them, rebuild each from that."""
    starts = [*firsts, len(stages.spans)]
    roll = Rollout(stages.graph)
    for first, end in pairwise(starts):
        segment = stages.spans[first:end]
        roll.serve(_unpacks(segment), set(stages.given | segment[0].enters))
    return roll.lives()


def _unpacks(spans: Iterable[StageSpan]) -> list[tuple[int, int]]:
    return sorted(unpack for span in spans for unpack in span.unpacks)
