"""Baselines: the policies that frameworks ship, as solvers of the same shape as any other.

Input: an observed graph (and its stages where the policy speaks of layers). Output: lives. No policy looks at bytes.
Source: Chen, Xu, Zhang, Guestrin, *Training deep nets with sublinear memory cost* (2016): `mirror` is its "drop the
results of low cost operations" as Echo (ISCA 2020, V-B) describes and measures it. Policies that no command of the package
shows are in benchmarks/lib/baselines.py.
"""

from __future__ import annotations

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.recompute.echo import just_in_time
from lightning_memopt.solvers.recompute.footprint import Footprint
from lightning_memopt.solvers.recompute.stages import Stages, cut
from lightning_memopt.solvers.rollout import Rollout, keep_all


def unmodified(graph: Graph) -> tuple[Life, ...]:
    """Everything that autograd saves is held."""
    return keep_all(graph)


def mirror(graph: Graph) -> tuple[Life, ...]:
    """Run every light op again and hold the results of the others, also where an op's inputs are larger than its outputs.

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


def recompute_everything(graph: Graph, stages: Stages | None = None) -> tuple[Life, ...]:
    """Hold no boundary: each stage's backward begins with a run from the start of the forward."""
    stages = stages or cut(graph)
    roll = Rollout(graph)
    for span in reversed(stages.spans):
        roll.serve(span.requests, set(stages.given))
    return roll.lives()
