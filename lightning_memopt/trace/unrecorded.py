"""Put into the graph of a step what the recorder does not see: hooks of sharded modules, and code that a compiler generated.

Each becomes an op without tensors. Only the allocator's counter shows what it takes, and what it leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_memopt.clocks import perf_counter
from lightning_memopt.graph import COMPILED, Point
from lightning_memopt.trace.seen import SeenOp
from lightning_memopt.trace.tracer import Tracer, backward_runs


@contextlib.contextmanager
def unrecorded_op(tracer: Tracer, name: str, frees: bool = False) -> Iterator[None]:
    """A context around unrecorded code. `frees`: bytes that it frees do not count as in memory at its point."""
    index = len(tracer.ops)
    phase = tracer.phase
    workspace_nbytes = 0
    if not frees:
        at = len(tracer.points)
        tracer.points.append(Point("op", index))
    began = perf_counter()
    if tracer.timed is not None:
        tracer.timed.begin(index)
    marks = tracer.marks
    if marks is not None:
        marks.begins(index, frees)
    try:
        yield
    finally:
        if marks is not None:
            marks.ends()
    if tracer.timed is not None:
        tracer.timed.end()
        workspace_nbytes = tracer.timed.beyond_left_nbytes
    if frees:
        if tracer.ledger is not None:
            tracer.ledger.note(len(tracer.points) - 1)
        at = len(tracer.points)
        tracer.points.append(Point("op", index))
    elif tracer.ledger is not None:
        tracer.ledger.ran(at)
    tracer.ops.append(
        SeenOp(
            name=name,
            phase=phase,
            inputs=(),
            outputs=(),
            mutates=(),
            seconds=perf_counter() - began,
            workspace_nbytes=workspace_nbytes,
            flops=0,
            scope="",
            heavy=False,
            recomputable=False,
            state_nbytes=0,
            at=at,
        )
    )


@contextlib.contextmanager
def generated_code(tracer: Tracer) -> Iterator[None]:
    """A context around a run of code that a compiler generated, forward or backward."""
    tracer.poll()
    if tracer.ledger is not None:
        tracer.ledger.note(len(tracer.points) - 1)
    backward = tracer.forward_over and backward_runs()
    if backward:
        tracer.backward_ran = True
        tracer.backward_begins()
    with made_unseen(tracer, COMPILED, backward):
        yield


@contextlib.contextmanager
def made_unseen(tracer: Tracer, name: str, backward: bool = True) -> Iterator[None]:
    """A context around code that makes tensors which recorded ops read later. `backward`: it frees what a forward saved."""
    with unrecorded_op(tracer, name, frees=backward):
        yield
        if backward:
            tracer.poll()
    tracer.generated[tracer.ops[-1].at] = len(tracer.ops) - 1
