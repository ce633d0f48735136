"""Tell listeners when the weights of sharded modules (FSDP2) come into memory and go, and hide the ops that move them.

`fully_shard` splits each weight over processes. A *unit*, a group of modules whose weights travel together, gathers them before
its forward and again before its backward, and lets go of them afterwards. The memory of a gathered weight is one storage, whose
size changes; its version counter does not.

The hooks in which weights are gathered, let go of, and gradients are reduced are hidden from the recorder. Otherwise the copy
into a weight would be an op that writes it, and a rebuild could start from the buffer of a collective. To a rebuild, a weight
is memory that no op of the step made, and that it may read only while the weight is gathered. No collective ever runs again.

While there is a listener, a hook that ran a collective also waits until gloo has let go of its buffers (`settling.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lightning_memopt.device.places import on_host
from lightning_memopt.record.exposure import unwatched
from lightning_memopt.record.modes import Outside
from lightning_memopt.record.seams import Patch, Seams
from lightning_memopt.record.settling import find_threads, settle
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import (
    COLLECTIVE_HOOKS,
    FREEING_HOOK,
    UNIT_HOOKS,
    frees_weights,
    fsdp_units,
    may_be_sharded,
    unit_class,
    unsharded_parameter,
)

Event = Literal["hook", "entered", "left", "leaving"]
"""A hook of the unit runs; its forward has begun; its forward is over; its weights are about to be freed. At the latter three
they are in memory, unless they were freed before.
"""
Listener = Callable[[Any, Event], contextlib.AbstractContextManager[None]]
"""`listener(unit, event)` is a context around the hook. For other events than "hook" nothing runs inside the context."""


def units_of(model: nn.Module) -> list[Any]:
    """The units of a model whose modules are sharded by FSDP2, each once."""
    if not may_be_sharded():
        return []
    return list({id(unit): unit for module in model.modules() for unit in fsdp_units(module)}.values())


def weights_of(unit: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) of the weights of a unit that were gathered before. A weight is in memory if its storage has bytes."""
    for i, p in enumerate(unit.fsdp_params):
        weight = unsharded_parameter(p)
        if weight is not None:
            yield getattr(p, "_param_fqn", None) or f"weight {i}", weight


def is_there(weight: torch.Tensor) -> bool:
    """Whether a gathered weight has its bytes in memory now."""
    return weight.untyped_storage().nbytes() > 0


@contextlib.contextmanager
def unseen_by(recorder: Outside) -> Iterator[None]:
    """Within, the recorder sees no op of this thread, and no listener hears of raw memory and of sizes."""
    with recorder.aside(), unwatched():
        yield


def _hiding(name: str, original: Any) -> Any:
    communicates, frees = name in COLLECTIVE_HOOKS, name == FREEING_HOOK

    @uncompiled
    def method(unit: Any, *args: Any, **kwargs: Any) -> Any:
        if frees and frees_weights(unit):
            _tell(unit, "leaving")
        with contextlib.ExitStack() as stack:
            for listener in tuple(_seams.listeners):
                stack.enter_context(listener(unit, "hook"))
            result = original(unit, *args, **kwargs)
            if communicates and on_host(unit.device):
                settle()  # within the listeners' contexts: they measure what is left after the hook
            return result

    return method


def _tell(unit: Any, event: Event) -> None:
    for listener in tuple(_seams.listeners):
        with listener(unit, event):
            pass


def _entering(original: Any) -> Any:
    @uncompiled
    def method(unit: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(unit, *args, **kwargs)
        _tell(unit, "entered")
        return out

    return method


def _leaving(original: Any) -> Any:
    @uncompiled
    def method(unit: Any, *args: Any, **kwargs: Any) -> Any:
        _tell(unit, "left")
        return original(unit, *args, **kwargs)

    return method


def _patches() -> Iterator[Patch]:
    cls = unit_class()
    for name in UNIT_HOOKS:
        yield cls, name, partial(_hiding, name)
    yield cls, "pre_forward", _entering
    yield cls, "post_forward", _leaving


_seams: Seams[Listener] = Seams(_patches)


def _no_listener(unit: Any, event: Event) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def settling() -> contextlib.AbstractContextManager[None]:
    """Within, the buffers of collectives are freed when a hook returns. Enter it when the groups of all units exist."""
    find_threads()
    return _seams.listening(_no_listener)


def around_units(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Within, tell `listener` of the units of sharded modules. The last caller that leaves restores torch's own functions."""
    return _seams.listening(listener)
