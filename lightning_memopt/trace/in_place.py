"""Run ops of an observed backward in place where torch would do so in a plain backward.

Torch's backward writes into gradients that nothing else holds: where autograd adds the results of several nodes, and in the
formulas that write into new zeros (`index`, `gather`, `sort`). While any dispatch mode is on, it makes a new tensor instead
(`isTensorSubclassLike` in ATen). An observed step, and the prediction from it, would then take more memory than a plain step.
So the in-place op runs here, exactly where torch would run it without a mode. This needs the native engine, which sees where a
node ends; without it, ops stay as they are.

Source: `accumulate` in input_buffer.cpp of torch's autograd, and the formulas in FunctionsManual.cpp.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from lightning_memopt.native.engine import loaded
from lightning_memopt.record import Outside, is_dense, is_plain, storage_id, uncompiled
from lightning_memopt.torch_private import OpOverload, current_node, storage_use_count, tensor_use_count, without_modes

_ATEN = torch.ops.aten
_ADD = _ATEN.add.Tensor
_FORMULAS: dict[OpOverload, tuple[OpOverload, frozenset[str]]] = {
    _ATEN.index_put.default: (_ATEN.index_put_.default, frozenset({"IndexBackward0"})),
    _ATEN.scatter_add.default: (
        _ATEN.scatter_add_.default,
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
    ),
    _ATEN.index_add.default: (_ATEN.index_add_.default, frozenset({"IndexSelectBackward0"})),
    _ATEN.scatter.src: (
        _ATEN.scatter_.src,
        frozenset(
            f"{reduction}Backward{i}"
            for reduction in ("Kthvalue", "Max", "Median", "Min", "Mode", "Nanmedian", "Sort", "Topk")
            for i in (0, 1)
        ),
    ),
    _ATEN.masked_scatter.default: (_ATEN.masked_scatter_.default, frozenset({"MaskedSelectBackward0"})),
    _ATEN.put.default: (_ATEN.put_.default, frozenset({"TakeBackward0"})),
}
"""Op -> (the in-place op, the nodes whose formulas call it on zeros that they have just made)."""
_NAMES = frozenset(func._name for func in (_ADD, *_FORMULAS))
"""The names of these ops, because hashing an overload runs Python code."""


class InPlace:
    """Decides which op runs instead of an op of backward. Close it when the step is over.

    names: names of the ops that others may run instead of.
    """

    names = _NAMES

    def __init__(self) -> None:
        self._native = loaded()
        self._add_: OpOverload = _ATEN.add_.Tensor
        self._alone = (0, 0, 0) if self._native is None else held_by_autograd_alone()
        self._handle = None if self._native is None else self._native.watch_nodes()

    def op(self, func: OpOverload, args: tuple[Any, ...]) -> OpOverload:
        """The op to run instead of `func`, on the same arguments; `func` itself if torch would not write in place."""
        if self._handle is None or func._name not in self.names or torch.is_grad_enabled():
            return func
        node = current_node()
        if node is None:
            return func
        runs = self._native.node_is(node._sequence_nr())
        if func is _ADD:
            return self._add_ if runs == 0 and self._accumulates(args) else func
        in_place, nodes = _FORMULAS[func]
        return in_place if runs == 1 and node.name() in nodes else func

    def _accumulates(self, args: tuple[Any, ...]) -> bool:
        """Whether autograd would add the second argument to the first one in place, because only autograd holds the first."""
        gradient, other = args
        if not (isinstance(other, torch.Tensor) and is_plain(gradient) and is_plain(other) and is_dense(gradient)):
            return False
        return use_counts(gradient) == self._alone

    def close(self) -> None:
        """Stop noting the nodes of backwards. May be repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.unwatch_nodes(handle)


def use_counts(t: torch.Tensor) -> tuple[int, int, int]:
    """The use counts of the tensor, of its storage, and of its Python object."""
    return tensor_use_count(t), storage_use_count(storage_id(t)), sys.getrefcount(t)


class _Counting(Outside):
    """Reads the use counts of a gradient to which autograd adds, under the conditions of an observed backward."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = (0, 0, 0)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is _ADD:
            self._accumulates(args)
        out = func._op(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            out.untyped_storage()  # makes the storage's Python object, which the tracer's reference makes, too
        return out

    def _accumulates(self, args: tuple[Any, ...]) -> None:
        gradient, _ = args
        self.alone = use_counts(gradient)


@cache
def held_by_autograd_alone() -> tuple[int, int, int]:
    """`use_counts` of a gradient that only autograd holds while it adds another one to it."""
    counting = _Counting()
    with without_modes(), torch.enable_grad(), ExitStack() as stack, torch.device("cpu"):
        x = torch.ones(2, requires_grad=True)
        y = x * 2.0
        z = y.exp() + y.sin()
        counting.enter_in(stack)
        z.backward(torch.ones(2))
    return counting.alone
