"""What CUDA's kernels allocate beyond their results, by operator: formulas, since kernels do not run in a recorded step.

An operator that is not here has no workspace in an answer. Those of cuBLAS are by card (`plan.rates.Device`).
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_memopt.graph import Graph, Op
from lightning_memopt.units import ceil_div

_ROWS, _COLUMNS = 64, (64, 128)
"""A tile of memory-efficient attention. Heads above the largest number of columns need more, and are not known."""


def _attention_backward(graph: Graph, op: Op) -> int:
    """Memory-efficient attention sums the queries' gradients in float32, tile by tile, and has one number for each row of
    probabilities. In float32, it first multiplies outputs by their gradients. Gradients of grouped keys and values are first
    made for each head. (What torch 2.14's host code asks for, on an emulated device.)
    """
    query, key = (graph.tensors[t] for t in op.outputs[:2])
    batch, heads, rows, width = query.size
    columns = next((n for n in _COLUMNS if width <= n), None)
    if columns is None:
        return 0
    row_nbytes = 4 * batch * heads * rows
    gradients = batch * heads * ceil_div(rows, _ROWS) * (_ROWS * columns * 4 + 16)
    product = query.nbytes + 2 * row_nbytes if query.dtype == "float32" else 0
    groups = heads // key.size[1]
    return max(product, gradients + row_nbytes) + (2 * groups * key.nbytes if groups > 1 else 0)


_OF: dict[str, Callable[[Graph, Op], int]] = {
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
}


def workspace_nbytes(graph: Graph, op: Op) -> int:
    """The workspace of an op on a CUDA device, as far as it is known."""
    of = _OF.get(op.name)
    return op.workspace_nbytes if of is None else max(op.workspace_nbytes, of(graph, op))
