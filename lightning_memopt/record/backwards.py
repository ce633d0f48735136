"""Tell listeners that a backward is about to run, before autograd saves which modes and hooks are on. (It restores them when
the backward ends.)

`Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call one function of torch, which is wrapped here.
A backward that other C++ code begins is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lightning_memopt.record.seams import Seams
from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself

Told = Callable[[bool], None]


@uncompiled
def _tell(goes_on: bool) -> None:
    for listener in tuple(_seams.listeners):
        listener(goes_on)


def _running(original: Any) -> Any:
    @uncompiled_itself
    def run_backward(outputs: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        # args: gradients of the outputs, whether the graph is kept, whether the gradients get a graph, inputs
        _tell(bool(args[2]) and not accumulate_grad)
        return original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)

    return run_backward


_seams: Seams[Told] = Seams(lambda: [(torch.autograd, "_engine_run_backward", _running)])


def before_backwards(told: Told) -> contextlib.AbstractContextManager[None]:
    """Within, call `told(goes_on)` before a backward runs in any thread. `goes_on` is true for `torch.autograd.grad(...,
    create_graph=True)`, whose gradients are part of the forward (a gradient penalty, forces, the inner steps of MAML).
    """
    return _seams.listening(told)
