"""Which tensors of a step are logits: the scores of all classes that a loss reads, what is made from them one by one, and
their gradients.

With a large vocabulary they are the peak of a language model's step: tokens x classes values, as they are, in float32, as
log-probabilities, and as gradients.
"""

from __future__ import annotations

from math import prod

from lightning_memopt.graph import BEFORE, Graph, Levels, Op

_SOFTMAX = "aten::_log_softmax"
_LOSSES = (
    _SOFTMAX,
    "aten::binary_cross_entropy_with_logits",
    "aten::multi_margin_loss",
    "aten::multilabel_margin_loss_forward",
)
"""Ops of losses whose first input has a score for each class. Attention takes a softmax, not its logarithm."""
_HOLLOW_NBYTES = 1 << 62
"""The place of logits that have no bytes among others: they did not fit."""
_SHARE = 2
"""What is made of logits one by one has at least one `_SHARE`-th of their values: those of the last token are left out, for
example."""
_PEAK_SHARE = 1 / 16
"""Least share of logits in the peak of a step for which tiles of them are looked for."""
_LEAST_NBYTES = 1 << 20
"""Least bytes of logits for which they are: fewer fit into the cache of a core."""
_PRODUCTS = ("aten::mm", "aten::addmm")
"""Products of matrices whose results can be made in tiles."""


def logits(graph: Graph) -> frozenset[int]:
    """Ids of the tensors that are logits: from the product of matrices that makes them to the one that reads their gradient."""
    found: set[int] = set()
    above = [op.inputs[0] for op in graph.forward if op.inputs and op.name.startswith(_LOSSES)]
    while above:
        t = above.pop()
        if t in found or graph.tensors[t].born_at == BEFORE:
            continue
        found.add(t)
        op = graph.producers.get(t)
        if op is not None and not op.heavy:
            above += [i for i in op.inputs if _alike(graph, i, t)]
    for op in graph.ops:
        read = [t for t in op.inputs if t in found]
        if read and not op.heavy and op.phase != "update":
            widest = max(read, key=lambda t: _values(graph, t))
            found.update(t for t in op.outputs if _alike(graph, t, widest))
    return frozenset(found)


def head_of(graph: Graph) -> Op | None:
    """The product of matrices that makes the largest logits of which a loss takes the logarithm of a softmax; None if there is
    none. The loss may be computed by the model, or by the loop.
    """
    heads: list[Op] = []
    for op in graph.ops:
        if op.name == _SOFTMAX and op.inputs:
            maker = graph.producers.get(op.inputs[0])
            while maker is not None and not maker.heavy and maker.inputs:
                maker = graph.producers.get(maker.inputs[0])
            if (
                maker is not None
                and maker.name in _PRODUCTS
                and _classes(graph, maker.outputs[0]) == _classes(graph, op.inputs[0])
            ):
                heads.append(maker)
    return max(heads, key=lambda op: graph.tensors[op.outputs[0]].nbytes or _HOLLOW_NBYTES, default=None)


def are_worth_tiles(graph: Graph, peak_nbytes: int) -> bool:
    """Whether the logits of a step are so many bytes at once that it pays to look for tiles. `peak_nbytes`: the peak of the
    unmodified step.
    """
    levels = Levels(len(graph.points))
    for id in logits(graph):
        t = graph.tensors[id]
        levels.add(t.born_at, max(t.freed_at, graph.saved_until(id)), t.nbytes)
    return is_worth_tiles(max(levels.levels(), default=0), peak_nbytes)


def is_worth_tiles(nbytes: int, peak_nbytes: int) -> bool:
    """Whether so many bytes of logits are enough, in a step with this peak."""
    return nbytes >= max(_LEAST_NBYTES, _PEAK_SHARE * peak_nbytes)


def _classes(graph: Graph, tensor: int) -> int:
    return graph.tensors[tensor].size[-1] if graph.tensors[tensor].size else 0


def _values(graph: Graph, tensor: int) -> int:
    return prod(graph.tensors[tensor].size)


def _alike(graph: Graph, a: int, b: int) -> bool:
    """Whether two tensors have nearly as many values."""
    fewer, more = sorted((_values(graph, a), _values(graph, b)))
    return _SHARE * fewer >= more > 1
