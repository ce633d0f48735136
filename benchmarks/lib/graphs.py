"""A step that is recorded without its bytes, compared with the same step that is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace

from lightning_memopt import optimize
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import observing
from lightning_memopt.graph import OUTSIDE, Graph, unmodified_levels
from lightning_memopt.integrations.asking import STEPS

Build = Callable[[], Training]


def computed(build: Build) -> Graph:
    """The last of the steps that `record` records, computed."""
    training = build()
    with optimize(training.model, training.optimizer, config=observing()) as run:
        for _ in range(STEPS):
            training.step()
        graph = run.session.observed_graph
    assert graph is not None
    return graph


def alone(graph: Graph, without: Collection[str] = (OUTSIDE,)) -> Graph:
    """The graph without the workspaces of kernels that do not run, and without the tensors of some names: what else is in this
    process.
    """
    rest = [t for t in graph.tensors if t.name not in without]
    new = {t.id: i for i, t in enumerate(rest)}

    def numbered(tensors: Iterable[int]) -> tuple[int, ...]:
        return tuple(new[t] for t in tensors if t in new)

    return replace(
        graph,
        tensors=tuple(replace(t, id=new[t.id], storage=new[t.storage]) for t in rest),
        ops=tuple(
            replace(
                op,
                workspace_nbytes=0,
                inputs=numbered(op.inputs),
                outputs=numbered(op.outputs),
                mutates=tuple((new[old], new[made]) for old, made in op.mutates),
                unrebuilt=numbered(op.unrebuilt),
            )
            for op in graph.ops
        ),
        saves=tuple(replace(save, tensor=new[save.tensor]) for save in graph.saves),
        updates=tuple(replace(update, parameter=new[update.parameter]) for update in graph.updates),
    )


FIELDS = ("id", "name", "phase", "inputs", "outputs", "mutates", "recomputable", "flops", "scope")
"""What must be equal of an op: all but its measured seconds."""


def different(recorded: Graph, real: Graph, without: Collection[str] = (OUTSIDE,)) -> str:
    """The first difference of two graphs, without tensors of some names; "" if there is none."""
    ours, theirs = alone(recorded, without), alone(real, without)
    for a, b in zip(ours.ops, theirs.ops, strict=False):
        for field in FIELDS:
            if getattr(a, field) != getattr(b, field):
                return f"{field} of op {a.id}, {b.name} in {b.scope}: {getattr(a, field)}, computed {getattr(b, field)}"
    if len(ours.ops) != len(theirs.ops):
        return f"{len(ours.ops)} ops, computed {len(theirs.ops)}"
    for s, t in zip(ours.tensors, theirs.tensors, strict=True):
        if s != t:
            names = [f.name for f in fields(s) if getattr(s, f.name) != getattr(t, f.name)]
            said = ", ".join(f"{name} {getattr(s, name)}, computed {getattr(t, name)}" for name in names)
            return f"tensor {t.id}, {t.name} of {t.nbytes} bytes: {said}"
    for what in ("saves", "points"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"other {what}"
    return ""


def peak_nbytes(graph: Graph) -> int:
    return max(unmodified_levels(alone(graph)))
