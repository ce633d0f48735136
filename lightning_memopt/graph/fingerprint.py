"""The fingerprint of a graph, by which a plan recognises the model that it was made for, and the first difference of two
graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

from lightning_memopt.graph.model import Graph


def _lines(graph: Graph, of_any_size: Container[int] = ()) -> list[str]:
    """One line for each forward op. Tensors are numbered by their first use, so other tensors in memory do not matter."""
    number: dict[int, int] = {}

    def name(tensor: int) -> str:
        windows = graph.tensors[tensor].windows
        return f"{number.setdefault(tensor, len(number))}{f'~{len(windows)}' if windows else ''}"

    def names(tensors: tuple[int, ...]) -> str:
        return " ".join(map(name, tensors))

    def size(tensor: int) -> str:
        return "?" if tensor in of_any_size else str(graph.tensors[tensor].nbytes)

    return [f"{op.name}({names(op.inputs)})->{names(op.outputs)}:{','.join(map(size, op.outputs))}" for op in graph.forward]


def fingerprint(graph: Graph, of_any_size: Container[int] = ()) -> str:
    """Hex digest of the forward pass: names and dataflow of ops, sizes of tensors, how often they come, saves, device.

    Times are not part of it, nor are the sizes of the tensors in `of_any_size`.
    """
    digest = hashlib.sha256(graph.device.encode())
    for line in _lines(graph, of_any_size):
        digest.update(line.encode())
    for save in graph.saves:
        size = "?" if save.tensor in of_any_size else graph.tensors[save.tensor].nbytes
        digest.update(f"{save.op}:{size};".encode())
    return digest.hexdigest()[:32]


def first_difference(first: Graph, second: Graph) -> str | None:
    """Text that names the first forward op in which two graphs differ; None if the forward passes are equal."""
    for a, b, line_a, line_b in zip(first.forward, second.forward, _lines(first), _lines(second), strict=False):
        if line_a != line_b:
            return f"op {a.id}: {a.name} in {a.scope or 'the model'} against {b.name} in {b.scope or 'the model'}"
    if len(first.forward) != len(second.forward):
        return f"{len(first.forward)} forward ops against {len(second.forward)}"
    return None if fingerprint(first) == fingerprint(second) else "the tensors that autograd saves"
