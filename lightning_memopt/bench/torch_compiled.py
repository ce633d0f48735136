"""torch's `activation_memory_budget`, for regions that the user compiles: with Inductor, and with AOT autograd in eager mode.

The model is compiled in place. FLOPs of forward and backward are those of the graphs that torch's partitioner makes, beyond
those of the joint graphs, in which nothing runs again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lightning_memopt.bench.methods import Applied, eagerly
from lightning_memopt.bench.subject import Subject
from lightning_memopt.compiled.joint import flops_of
from lightning_memopt.compiled.partitioner import as_torch_does, asked_to_split
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.record import listening_to
from lightning_memopt.torch_private import autograd_config

EAGER = "aot_eager_decomp_partition"


def _flops(module: fx.GraphModule) -> int:
    return sum(map(flops_of, module.graph.nodes))


@contextlib.contextmanager
def torch_splits(memory_budget: float) -> Iterator[dict[str, int]]:
    """Regions are split as torch does with this `activation_memory_budget`. FLOPs of a step: in all, and those of the joint
    graphs, in which nothing runs again.
    """
    flops = {"all": 0, "joint": 0}

    def counting(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        flops["joint"] += _flops(gm)
        halves = as_torch_does(gm, joint_inputs, **options)
        flops["all"] += sum(map(_flops, halves))
        return halves

    functorch = autograd_config().patch(activation_memory_budget=memory_budget)
    with functorch, listening_to([asked_to_split(lambda _: counting)]):
        yield flops


@contextlib.contextmanager
def compiled_in_place(model: Any, backend: str) -> Iterator[None]:
    """The model is compiled, with all that it calls. At the end it is eager again."""

    def call(*args: Any, **kwargs: Any) -> Any:  # a frame of its own: dynamo skips those of torch.nn, also a whole Sequential
        return model._call_impl(*args, **kwargs)

    torch.compiler.reset()
    try:
        model._compiled_call_impl = torch.compile(call, backend=backend)
        yield
    finally:
        model._compiled_call_impl = None
        torch.compiler.reset()


@contextlib.contextmanager
def compiled(subject: Subject, backend: str, memory_budget: float) -> Iterator[Applied]:
    """The model of the subject compiled in place by this backend."""
    with torch_splits(memory_budget) as flops, compiled_in_place(subject.model, backend):

        def extra() -> float:
            if not flops["joint"]:
                raise UnsupportedError("torch.compile made no graph of this step. Give a step that calls the model itself.")
            return float(flops["all"] - flops["joint"])

        yield Applied(without=lambda: eagerly([subject.model]), extra_flops=extra)
