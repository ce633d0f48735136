"""Which backward ops read a saved tensor, and which part of its values they need."""

from __future__ import annotations

import math
from functools import cache

from lightning_memopt.graph import Graph, Op
from lightning_memopt.plan.readers import Need, lossy, need
from lightning_memopt.torch_private import schema_of


@cache
def _tensor_arguments(name: str) -> tuple[str, ...] | None:
    """Names of the tensor arguments of an op, `aten::name.overload`; None where inputs cannot be matched with arguments."""
    try:
        schema = schema_of(*name.partition(".")[::2])
    except RuntimeError:
        return None
    kinds = [(a.name, str(a.real_type)) for a in schema.arguments]
    return None if any("Tensor[]" in kind for _, kind in kinds) else tuple(n for n, kind in kinds if "Tensor" in kind)


def readers(graph: Graph, t: int) -> list[tuple[Op, str]]:
    """The backward ops that read a tensor, each with the name of the argument; "" where that is not certain."""
    backward = []
    for op in graph.consumers.get(t, ()):
        if op.phase != "forward":
            names = _tensor_arguments(op.name)
            known = names is not None and len(names) == len(op.inputs)
            backward.append((op, names[op.inputs.index(t)] if known and names is not None else ""))
    return backward


def needs(graph: Graph, t: int) -> set[str]:
    """The parts of a ReLU's result that backward needs: "value", "sign" or "shape"."""
    known = readers(graph, t)
    return {_need(graph, t, op, argument) for op, argument in known} if known else {"value"}


def _need(graph: Graph, t: int, op: Op, argument: str) -> Need:
    """The part of a ReLU's result that a backward op needs. It needs the value where `threshold` reads the result, too,
    because the backward of `threshold` is the same op as ReLU's.
    """
    compared = any(o.phase == "forward" and _base(o).startswith("threshold") for o in graph.consumers.get(t, ()))
    return need(_base(op), argument, threshold=math.nan if compared else 0.0)


def _base(op: Op) -> str:
    return op.name.partition("::")[2].partition(".")[0]


def bears_errors(graph: Graph, t: int, gated: bool = False) -> bool:
    """Whether errors in a tensor stay within the gradients of weights: every backward op that reads the tensor makes only the
    gradient of a parameter with which the tensor met in forward.

    `gated`: readers that need only the sign or the shape do not count, because the form keeps both.
    """
    exposed = [(op, arg) for op, arg in readers(graph, t) if not gated or _need(graph, t, op, arg) == "value"]
    forward = [op for op in graph.consumers.get(t, ()) if op.phase == "forward" and op.heavy]
    met = all(any(graph.tensors[i].kind == "parameter" for i in op.inputs) for op in forward)
    return bool(exposed and forward and met and all(lossy(_base(op), argument) for op, argument in exposed))
