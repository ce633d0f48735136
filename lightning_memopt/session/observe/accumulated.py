"""When autograd accumulates the gradients of a model's parameters in an observed step, which tensors they are, and why some of
them cannot be parked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.record import Recorder, is_plain, uncompiled
from lightning_memopt.record.tensors import is_foreign
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.runtime.parked_gradients import may_be_parked
from lightning_memopt.torch_private import gradient_of, remove_accumulation_hook
from lightning_memopt.trace import Tracer

_LEAST_NBYTES = 512
"""Smaller gradients are not looked at: none of them is parked."""
_SPARSE = Reason("they are sparse", "Set sparse=False")
_OTHER = Reason("they are no plain tensors", "If the bytes matter, train plain parameters")
_RETAINED = Reason("they have a history of their own", "Leave create_graph=True out")
_TAKEN = Reason("other libraries have their memory", "Copy them first: p.grad.cpu().clone().numpy()")
_EARLIER = Reason("they were made before the forward of this plan", "If the bytes matter, call backward once, for all losses")
_SHARED = Reason("other tensors have their memory, too", "If the bytes matter, make gradients that are no views of one tensor")


@dataclass
class Kept:
    """Gradients that cannot be parked. `why`: name of a parameter -> (bytes of its last gradient, the reason)."""

    why: dict[str, tuple[int, Reason]] = field(default_factory=dict)


class Accumulated:
    """The gradients of one round. `listening`: the context in which autograd accumulates them. `kept` is told of those that
    cannot be parked.
    """

    def __init__(
        self, model: nn.Module, tracer: Tracer, recorder: Recorder, listening: contextlib.ExitStack, kept: Kept
    ) -> None:
        self._kept = kept
        self._tracer = tracer
        self._recorder = recorder
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (version of the gradient's storage, point)
        self._earlier: set[str] = set()  # those that are there before the round has accumulated any
        leaves = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_leaf}
        leaves = {name: p for name, p in leaves.items() if p.nbytes >= _LEAST_NBYTES}
        self._names = {id(p): name for name, p in leaves.items()}
        listening.callback(remove_accumulation_hook, leaves.values(), self._accumulated)
        for name, p in leaves.items():
            if gradient_of(p) is not None:
                self._earlier.add(name)
            p.register_post_accumulate_grad_hook(self._accumulated)

    @uncompiled
    def _accumulated(self, p: torch.Tensor) -> None:
        name = self._names[id(p)]
        self._earlier.discard(name)
        gradient = gradient_of(p)
        if gradient is None:
            return
        if not may_be_parked(gradient):
            self._kept.why[name] = _nbytes(gradient), _why(gradient)
            return
        self._kept.why.pop(name, None)
        if name not in self._seen:
            self._seen[name] = self._recorder.adopt(gradient).id, len(self._tracer.points) - 1

    def in_graph(self, graph: Graph) -> Graph:
        """The round's graph with these gradients (`Graph.gradients`). A line may tell of those that were there before."""
        left = {f"{name}.grad": name for name in self._earlier}
        for t in graph.tensors:
            if t.kind == "gradient" and t.born_at == BEFORE and t.nbytes and t.name in left:
                self._kept.why[left[t.name]] = t.nbytes, _EARLIER
        ids = {version: i for i, version in enumerate(sorted(self._tracer.tensors))}
        gradients = {name: (ids[version], point) for name, (version, point) in self._seen.items() if version in ids}
        return dataclasses.replace(graph, gradients=gradients)


def _nbytes(gradient: torch.Tensor) -> int:
    return gradient._values().nbytes if gradient.layout is torch.sparse_coo else gradient.nbytes


def _why(gradient: torch.Tensor) -> Reason:
    """Why this gradient cannot be parked."""
    if gradient.layout is not torch.strided:
        return _SPARSE
    if not is_plain(gradient):
        return _OTHER
    if gradient.requires_grad:
        return _RETAINED
    return _TAKEN if is_foreign(gradient) else _SHARED
