"""What CUDA's kernels allocate beyond their results, by operator, and which results are the host's: formulas, since kernels do
not run in a recorded step.

An operator that is not here has no workspace in an answer. Those of cuBLAS are by card (`plan.rates.Device`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from lightning_memopt.graph import UNRECORDED, Graph, Op
from lightning_memopt.units import ceil_div

_HALF = ("bfloat16", "float16")
_MULTIPROCESSORS, _RESIDENT_THREADS = 132, 2048
"""Of an H100, and threads that each holds. Other cards have fewer, and divide a sum into fewer parts."""
_THREADS, _WARP = 512, 32
_FEW, _MANY = 16, 256
"""A thread of a sum adds up at least, and at most, so many values before the sum is divided among blocks."""


def _attention_backward(graph: Graph, op: Op) -> int:
    """Memory-efficient attention sums the queries' gradients in float32, tile by tile, and has one number for each row of
    probabilities. In float32, it first multiplies outputs by their gradients. Gradients of grouped keys and values are first
    made for each head. (What torch 2.14's host code asks for, on an emulated device. Wide heads in half precision are not
    known.)
    """
    query, key = (graph.tensors[t] for t in op.outputs[:2])
    batch, heads, rows, width = query.size
    half = query.dtype in _HALF
    if half and width > 128:
        return 0
    tall, wide = (64, 64) if width <= 64 else (128, 128) if half else (128, 64)
    row_nbytes = 4 * batch * heads * rows
    gradients = batch * heads * ceil_div(rows, tall) * ceil_div(width, wide) * (tall * wide * 4 + 16)
    product = query.nbytes + 2 * row_nbytes if query.dtype == "float32" else 0
    groups = heads // key.size[1]
    return max(product, gradients + row_nbytes) + (2 * groups * key.nbytes if groups > 1 else 0)


def sum_nbytes(rows: int, columns: int, item_nbytes: int = 4) -> int:
    """The workspace of the sum of a matrix's rows, as a bias's gradient is, in float32 or half precision: each block writes the
    sums of its part, once for each thread (ATen/native/cuda/Reduce.cuh: `setReduceConfig`, `global_memory_size`). A matrix with
    more bytes than 32 bits count is summed in halves.
    """
    while rows * columns * item_nbytes >= 1 << 31:
        rows = ceil_div(rows, 2)
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    across = _power_of_two(columns // vector)
    high = min(_power_of_two(rows), _THREADS // vector // min(across, _WARP))
    across = min(across, _THREADS // vector // high)
    values, blocks = ceil_div(rows, high), ceil_div(columns, across * vector)
    most = _MULTIPROCESSORS * _RESIDENT_THREADS // (across * high)
    if rows < _FEW * high or values < _MANY or blocks > most:
        return 0
    parts = max(min(ceil_div(most, blocks), ceil_div(values, _FEW)), ceil_div(values, _MANY))
    return 4 * columns * parts * across * vector + 4 * blocks if parts > 1 else 0


def _power_of_two(n: int) -> int:
    """The largest one that is not above `n`."""
    return 1 << (n.bit_length() - 1)


def _sum(graph: Graph, op: Op) -> int:
    """A sum over all dimensions but the last."""
    (summed, *_), (made, *_) = ([graph.tensors[t] for t in ids] for ids in (op.inputs, op.outputs))
    if not summed.size or summed.dtype not in ("float32", *_HALF) or not made.size:
        return 0
    columns = summed.size[-1]
    if prod(made.size) != columns or made.size[-1] != columns or columns == 0:
        return 0
    return sum_nbytes(prod(summed.size) // columns, columns, 4 if summed.dtype == "float32" else 2)


_OF: dict[str, Callable[[Graph, Op], int]] = {
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::sum.dim_IntList": _sum,
}
_ON_HOST = {"aten::_scaled_dot_product_efficient_attention": 2}
"""Op -> number of its results on the device. The others, the seed and the offset of its random numbers, are on the host."""
_NUMBER_NBYTES = 8
_WRITES_A_NUMBER = {"aten::lift_fresh", "aten::fill_.Tensor"}
"""The ops that read the number of `x[0] = 2`."""


def on_host(graph: Graph) -> set[int]:
    """Ids of the tensors that are on the host: some results of ops, and numbers of user code (`x * 2`, `x[0] = 2`)."""
    read_by: dict[int, set[str]] = {}
    for op in graph.ops:
        for t in op.inputs:
            read_by.setdefault(t, set()).add(op.name)
    numbers = {t.id for t in graph.tensors if t.nbytes <= _NUMBER_NBYTES}
    made = {t for op in graph.forward if op.name in _ON_HOST for t in op.outputs[_ON_HOST[op.name] :]}
    return made | {t for t in numbers if graph.tensors[t].name == UNRECORDED or read_by.get(t) == _WRITES_A_NUMBER}


def workspace_nbytes(graph: Graph, op: Op) -> int:
    """The workspace of an op on a CUDA device, as far as it is known."""
    of = _OF.get(op.name)
    return op.workspace_nbytes if of is None else max(op.workspace_nbytes, of(graph, op))
