"""What a plan is made for: a digest of the forward ops and sizes, and where two graphs first differ."""

from __future__ import annotations

import hashlib
from collections.abc import Container

from lightning_memopt.graph.model import Graph


def _lines(graph: Graph, of_any_size: Container[int] = ()) -> list[str]:
    """One line per forward op. Tensors are numbered by first appearance, so what else was in memory does not matter."""
    number: dict[int, int] = {}

    def names(tensors: tuple[int, ...]) -> str:
        return " ".join(str(number.setdefault(t, len(number))) for t in tensors)

    def size(tensor: int) -> str:
        return "?" if tensor in of_any_size else str(graph.tensors[tensor].nbytes)

    return [f"{op.name}({names(op.inputs)})->{names(op.outputs)}:{','.join(map(size, op.outputs))}" for op in graph.forward]


def fingerprint(graph: Graph, of_any_size: Container[int] = ()) -> str:
    """Hex digest of the forward pass: op names, dataflow, sizes, what is saved, device. Times do not enter, nor do the sizes
    of tensors `of_any_size`.
    """
    digest = hashlib.sha256(graph.device.encode())
    for line in _lines(graph, of_any_size):
        digest.update(line.encode())
    for save in graph.saves:
        size = "?" if save.tensor in of_any_size else graph.tensors[save.tensor].nbytes
        digest.update(f"{save.op}:{size};".encode())
    return digest.hexdigest()[:32]


def first_difference(one: Graph, other: Graph) -> str | None:
    """Text naming the first forward op in which two graphs differ; None when the forward passes agree."""
    for a, b, line, line_b in zip(one.forward, other.forward, _lines(one), _lines(other), strict=False):
        if line != line_b:
            return f"op {a.id}: {a.name} in {a.scope or 'the model'} against {b.name} in {b.scope or 'the model'}"
    if len(one.forward) != len(other.forward):
        return f"{len(one.forward)} forward ops against {len(other.forward)}"
    return None if fingerprint(one) == fingerprint(other) else "the tensors that autograd saves"
