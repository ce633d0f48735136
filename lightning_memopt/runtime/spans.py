"""Spans of a planned step in the trace of torch's profiler, if one runs: rebuilds, parking, fetches and waits.

`torch.profiler.profile(...)` around planned steps and `export_chrome_trace` show them by name next to torch's own ops. Without
a profiler a span costs one call to torch, which asks whether one runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Fetch, Rebuild, Segment
from lightning_memopt.torch_private import profiler_is_on, record_function
from lightning_memopt.units import format_nbytes

_NOTHING = contextlib.nullcontext()


def segment(graph: Graph, steps: Segment | None) -> contextlib.AbstractContextManager[Any]:
    """The span of a segment. It says which modules' ops run again, how many, and how many fetches begin."""
    if steps is None or not profiler_is_on():
        return _NOTHING
    ops = [step.op for step in steps if isinstance(step, Rebuild)]
    fetches = sum(isinstance(step, Fetch) for step in steps)
    parts = []
    if ops:
        first, last = (graph.ops[op].scope.partition("#")[0] for op in (ops[0], ops[-1]))
        where = first if first == last else f"{first} to {last}"
        parts.append(f"rebuild {where or 'the model itself'}: {len(ops)} op{'s' * (len(ops) != 1)}")
    if fetches:
        parts.append(f"{fetches} fetch{'es' * (fetches != 1)}")
    return _span(", ".join(parts) or "free")


def transfer(what: str, nbytes: int) -> contextlib.AbstractContextManager[Any]:
    """The span of the beginning of a copy, or of the wait for it: "park", "fetch", "wait for"."""
    return _span(f"{what} {format_nbytes(nbytes)}") if profiler_is_on() else _NOTHING


def _span(text: str) -> contextlib.AbstractContextManager[Any]:
    span: contextlib.AbstractContextManager[Any] = record_function(f"MemOpt: {text}")
    return span
