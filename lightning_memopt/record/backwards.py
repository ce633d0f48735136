"""Tell listeners that a backward is about to run, before autograd saves which modes and hooks are on, and that one has raised.
(Autograd restores them when the backward ends, and has callbacks of its own for backwards that end as they should.)

`Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call one function of torch, which is wrapped here.
A backward that other C++ code begins is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_memopt.record.seams import Seams
from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself

Told = Callable[[bool], None]


class _Listener(NamedTuple):
    begins: Told
    failed: Callable[[], None]


@uncompiled
def _tell(goes_on: bool) -> None:
    for listener in tuple(_seams.listeners):
        listener.begins(goes_on)


@uncompiled
def _tell_of_failure() -> None:
    for listener in tuple(_seams.listeners):
        listener.failed()


def _running(original: Any) -> Any:
    @uncompiled_itself
    def run_backward(outputs: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        # args: gradients of the outputs, whether the graph is kept, whether the gradients get a graph, inputs
        _tell(bool(args[2]) and not accumulate_grad)
        try:
            return original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        except BaseException:
            _tell_of_failure()
            raise

    return run_backward


_seams: Seams[_Listener] = Seams(lambda: [(torch.autograd, "_engine_run_backward", _running)])


def before_backwards(told: Told) -> contextlib.AbstractContextManager[None]:
    """Within, call `told(goes_on)` before a backward runs in any thread. `goes_on` is true for `torch.autograd.grad(...,
    create_graph=True)`, whose gradients are part of the forward (a gradient penalty, forces, the inner steps of MAML).
    """
    return _seams.listening(_Listener(told, lambda: None))


def after_failed_backwards(told: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within, call `told()` when a backward has raised in any thread."""
    return _seams.listening(_Listener(lambda goes_on: None, told))
