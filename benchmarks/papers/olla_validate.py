"""An independent check of a sequence of a recorded step, with code of its own: who wrote what last."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.graph import Graph, Op


def faults_in_step(graph: Graph, sequence: Sequence[int]) -> list[str]:
    """One line for every op of a recorded step that would not find memory in the state in which it found it in the step.

    That holds if each storage that the op reads or writes was last written by the same op as in the step. Random ops, ops about
    which only the name is known, and the normalisations of one layer must keep their order. What ran after Python read a value
    must still run after it (except views, which make and write nothing).
    """
    if sorted(sequence) != list(range(len(graph.ops))):
        return [f"{len(sequence)} numbers are not the {len(graph.ops)} ops of the step, each once"]
    expected, lines = _met(graph, range(len(graph.ops))), []
    for op, met in _met(graph, sequence).items():
        if met != expected[op]:
            lines.append(f"op {op} ({graph.ops[op].name}) meets other memory than in the step")
    kept: dict[str, list[int]] = {}
    for each in graph.ops:
        for name in _kept(each):
            kept.setdefault(name, []).append(each.id)
    place = {i: at for at, i in enumerate(sequence)}
    lines += [f"{name} ops change places" for name, ids in kept.items() if sorted(ids, key=place.__getitem__) != ids]
    for reader in (op.id for op in graph.ops if _base(op) in _READ_BY_PYTHON):
        early = [op.id for op in graph.ops[reader + 1 :] if place[op.id] < place[reader] and not _is_view(op)]
        lines += [f"op {i} runs before Python has read the value of op {reader}" for i in early]
    return lines


_READ_BY_PYTHON = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive",
)  # fmt: skip


def _base(op: Op) -> str:
    return op.name.replace("::", ".").split(".")[1] if "." in op.name.replace("::", ".") else ""


def _is_view(op: Op) -> bool:
    return not op.outputs and len(op.inputs) <= 1 and not _base(op).endswith("_")


def _kept(op: Op) -> list[str]:
    names = ["random"] if op.state_nbytes > 0 else []
    if op.name.replace("::", ".").split(".")[0] not in ("aten", "prims", "profiler"):
        names.append("unknown")
    if op.phase == "forward" and "batch_norm" in op.name:
        names.append(f"{op.scope.split('#')[0] or 'unnamed'} batch norm")
    return names


def _met(graph: Graph, sequence: Sequence[int]) -> dict[int, dict[int, int]]:
    """Op -> storage that it reads or writes -> the op that wrote it last, itself left out."""
    storage = {t.id: t.storage for t in graph.tensors}
    last: dict[int, int] = {}
    met = {}
    for i in sequence:
        op = graph.ops[i]
        touched = {storage[t] for t in (*op.inputs, *op.outputs)}
        met[i] = {s: last.get(s, -1) for s in touched}
        base = _base(op)
        wrote = {storage[t] for t in op.outputs}
        if base.endswith("_") and op.inputs:
            wrote |= {storage[t] for t in (op.inputs if base.startswith("_") else op.inputs[:1])}
        elif op.phase != "forward" and op.name.endswith("out"):
            wrote |= {storage[t] for t in op.inputs}
        last.update(dict.fromkeys(wrote, i))
    return met
