"""What to compare with: the policies that frameworks ship, as solvers of the same shape as any other.

Input: an observed graph (and its stages where the policy speaks of layers). Output: lives. No policy looks at bytes.
Sources: Chen, Xu, Zhang, Guestrin, *Training deep nets with sublinear memory cost* (2016): `mirror` is its "drop the
results of low cost operations" as Echo (ISCA 2020, V-B) describes and measures it, `sqrt_n` its segments; `per_stage`
is checkpointing of every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.dataflow import just_in_time
from lightning_memopt.solvers.footprint import Footprint
from lightning_memopt.solvers.rollout import Rollout, keep_all
from lightning_memopt.solvers.stages import Stages, StageSpan, cut


def unmodified(graph: Graph) -> tuple[Life, ...]:
    """Everything that autograd saves is held."""
    return keep_all(graph)


def mirror(graph: Graph) -> tuple[Life, ...]:
    """Run every light op again, hold what the others made; larger inputs than outputs are nobody's concern.

    As in the framework that Echo is compared with: dropout is not run again, and the backward of a heavy op reads what the
    forward gave it (Echo, fig. 14c), so that is held too.
    """
    path = Footprint(graph)
    for op in graph.forward:
        if op.state_nbytes and op.id in path.ops:
            path.remove({op.id}, only_if_no_worse=False)
    held = set()
    for save in graph.saves:
        if save.op < len(graph.forward) and graph.ops[save.op].heavy and graph.packed(save) in graph.ops[save.op].inputs:
            held.add(save.tensor)
    return just_in_time(path, held)


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


def recompute_everything(graph: Graph, stages: Stages | None = None) -> tuple[Life, ...]:
    """Hold no boundary: each stage's backward begins with a run from the start of the forward."""
    stages = stages or cut(graph)
    roll = Rollout(graph)
    for span in reversed(stages.spans):
        roll.serve(span.requests, set(stages.given))
    return roll.lives()


def _segments(stages: Stages, firsts: Iterable[int]) -> tuple[Life, ...]:
    """Segments begin at the stages `firsts`: hold what enters them, rebuild each from that."""
    starts = [*firsts, len(stages.spans)]
    roll = Rollout(stages.graph)
    for first, end in pairwise(starts):
        segment = stages.spans[first:end]
        roll.serve(_requests(segment), set(stages.given | segment[0].enters))
    return roll.lives()


def _requests(spans: Iterable[StageSpan]) -> list[tuple[int, int]]:
    return sorted(request for span in spans for request in span.requests)
