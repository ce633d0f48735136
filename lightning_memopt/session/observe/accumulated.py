"""When autograd accumulates the gradients of a model's parameters in an observed step, and which tensors they are."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import torch
from torch import nn

from lightning_memopt.graph import Graph
from lightning_memopt.record import Recorder, uncompiled
from lightning_memopt.runtime.parked_gradients import may_be_parked
from lightning_memopt.torch_private import gradient_of
from lightning_memopt.trace import Tracer


class Accumulated:
    """The gradients of one round. `listening`: the context in which autograd accumulates them."""

    def __init__(self, model: nn.Module, tracer: Tracer, recorder: Recorder, listening: contextlib.ExitStack) -> None:
        self._tracer = tracer
        self._recorder = recorder
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (version of the gradient's storage, point)
        for name, p in model.named_parameters():
            if p.requires_grad and p.is_leaf:
                listening.callback(p.register_post_accumulate_grad_hook(partial(self._accumulated, name)).remove)

    @uncompiled
    def _accumulated(self, name: str, p: torch.Tensor) -> None:
        gradient = gradient_of(p)
        if name not in self._seen and gradient is not None and may_be_parked(gradient):
            self._seen[name] = self._recorder.adopt(gradient).id, len(self._tracer.points) - 1

    def in_graph(self, graph: Graph) -> Graph:
        """The round's graph with these gradients (`Graph.gradients`)."""
        ids = {version: i for i, version in enumerate(sorted(self._tracer.tensors))}
        gradients = {name: (ids[version], point) for name, (version, point) in self._seen.items() if version in ids}
        return dataclasses.replace(graph, gradients=gradients)
