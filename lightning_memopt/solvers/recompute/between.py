"""Plans between two plans of a graph, for budgets that are too small for the one and larger than the other needs.

Tensors made before some point of the forward live as in the one plan, and tensors made after it as in the other. So a plan can
checkpoint six layers of twelve although no solver proposed this: the prices of a hull give only the plans at its corners.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Rebuild, lower
from lightning_memopt.solvers.rollout import Rollout

Lives = tuple[Life, ...]


def _tight(graph: Graph, lives: Iterable[Life]) -> Lives:
    """The lives for the same rebuilds, each shortened to end with its last read. Raises LoweringError."""
    roll = Rollout(graph)
    for point, steps in lower(graph, lives).segments.items():
        roll.run(point, [step.op for step in steps if isinstance(step, Rebuild)])
    return roll.lives()


def mixed(graph: Graph, early: Iterable[Life], late: Iterable[Life], moment: int) -> Lives:
    """The plan in which tensors made before point `moment` live as in `early`, and all others as in `late`.

    Raises LoweringError if such a plan would need a tensor that cannot be made.
    """
    born = [tensor.born_at for tensor in graph.tensors]
    lives = [life for life in early if born[life.tensor] < moment] + [life for life in late if born[life.tensor] >= moment]
    return _tight(graph, sorted(lives, key=lambda life: (life.tensor, life.born_at)))


def moments_between(graph: Graph, plan: Iterable[Life], other: Iterable[Life], parts: int) -> list[int]:
    """Points that divide the tensors whose lives differ between the two plans into `parts` parts of about equal bytes."""
    differing = sorted({life.tensor for life in set(plan) ^ set(other)}, key=lambda t: graph.tensors[t].born_at)
    total = sum(graph.tensors[t].nbytes for t in differing)
    points: list[int] = []
    passed = 0
    for t in differing:
        if passed * parts >= total * (len(points) + 1) and len(points) < parts - 1:
            points.append(graph.tensors[t].born_at)
        passed += graph.tensors[t].nbytes
    return sorted(set(points))
