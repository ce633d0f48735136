"""What a plan is made for: a digest of the forward ops and sizes, and where two graphs first differ."""

from __future__ import annotations

import hashlib

from lightning_memopt.graph.model import Graph, Op


def _line(graph: Graph, op: Op) -> str:
    sizes = ",".join(str(graph.tensors[t].nbytes) for t in op.outputs)
    return f"{op.name}({' '.join(map(str, op.inputs))})->{' '.join(map(str, op.outputs))}:{sizes}"


def fingerprint(graph: Graph) -> str:
    """Hex digest of the forward pass: op names, dataflow, sizes, device. Times do not enter."""
    digest = hashlib.sha256(graph.device.encode())
    for op in graph.forward:
        digest.update(_line(graph, op).encode())
    for save in graph.saves:
        digest.update(f"{save.tensor}@{save.op};".encode())
    return digest.hexdigest()[:32]


def first_difference(one: Graph, other: Graph) -> str | None:
    """Text naming the first forward op in which two graphs differ; None when the forward passes agree."""
    for a, b in zip(one.forward, other.forward, strict=False):
        if _line(one, a) != _line(other, b):
            return f"op {a.id}: {a.name} in {a.scope or 'the model'} against {b.name} in {b.scope or 'the model'}"
    if len(one.forward) != len(other.forward):
        return f"{len(one.forward)} forward ops against {len(other.forward)}"
    return None if fingerprint(one) == fingerprint(other) else "the tensors that autograd saves"
