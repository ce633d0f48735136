"""Replace the gradient checkpointing of transformers' layers by the plan.

A plan decides for every saved tensor, so checkpointing whole layers as well only costs time: the layers would run again
whatever the budget. So during a run, the function that checkpoints a layer is replaced by one that just calls the layer.
Everything else that a model does when checkpointing is on stays, and the bits are the same, because checkpointing runs the same
ops again under the same generator states. With `use_reentrant=True` this is not certain: gradients of weights and tensors that
several layers share are added up in another order, and those of keyword arguments may be missing. Such layers are left as they
are.

In code that the user compiles, checkpointing stays: it is a mark on ops, and the plan of a compiled region removes the marks
(compiled/rewriting.py). Without such a plan the region runs as the user compiled it.

All fronts do this, for models of any library that checkpoints as transformers does. Input: the model of a run, before its first
step. `LayerCheckpointing` does not need transformers, because it looks for attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memopt.integrations import transformers_private
from lightning_memopt.record import compiled_modules
from lightning_memopt.session import RunStatus

_IN_COMPILED_CODE = "MemOpt: gradient checkpointing in compiled code stays until the plan of a compiled region replaces it."


class _Called:
    """Replaces a function that checkpoints, and just calls the forward. A copy or pickle of it is the original function.

    ran: whether it was called outside of compiled code. (In compiled code it is the original function.)
    """

    __slots__ = ("checkpoint", "ran")

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint, self.ran = checkpoint, False

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.checkpoint(forward, *args, **kwargs)
        self.ran = True
        return forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.checkpoint,)


def _same(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return checkpoint


class LayerCheckpointing:
    """The checkpointing of a model's layers, replaced from the construction of this object until `restore`.

    layers: names of the layers that ran without their checkpointing; empty if nothing was replaced, if the model does not say
        which they are (old style), or if all of them run in compiled code.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], None]) -> None:
        self.layers: tuple[str, ...] = ()
        self._say = say
        self._replaced: list[tuple[nn.Module, _Called]] = []
        functions = {
            name: (module, function)
            for name, module in model.named_modules()
            if (function := transformers_private.checkpointing_function(module)) is not None
            and not isinstance(function, _Called)
        }
        why = _why_not(model, [function for _, function in functions.values()])
        if functions and model in compiled_modules(model):
            say(_IN_COMPILED_CODE)
        elif why is not None:
            say(f"MemOpt: gradient checkpointing stays as it is, and a plan is made in addition: {why}.")
        elif functions:
            for module, function in functions.values():
                called = _Called(function)
                self._replaced.append((module, called))
                transformers_private.exchange_checkpointing_function(module, function, called)
            self.layers = tuple(name for name, (module, _) in functions.items() if transformers_private.is_layer(module))
            say("MemOpt: gradient checkpointing is replaced by the plan until the run ends. The table says what it would cost.")

    def look(self, status: Callable[[], RunStatus]) -> None:
        """Between two steps: restore checkpointing if there will be no plan."""
        if not self._replaced:
            return
        if self.layers and not any(called.ran for _, called in self._replaced):
            self.layers = ()
            self._say(_IN_COMPILED_CODE)
        now = status()
        if now.phase != "planned" and now.reason is not None:
            self.restore()
            self._say("MemOpt: gradient checkpointing is back, because there is no plan.")

    def restore(self) -> None:
        """Restore checkpointing. May be called again."""
        while self._replaced:
            module, called = self._replaced.pop()
            transformers_private.exchange_checkpointing_function(module, called, called.checkpoint)


def _why_not(model: nn.Module, functions: list[Callable[..., Any]]) -> str | None:
    """Why checkpointing by these functions must stay, and what to do; None if it can be replaced."""
    if not functions:
        return None
    if not all(isinstance(function, partial) and function.keywords.get("use_reentrant") is False for function in functions):
        return (
            "with use_reentrant=True its gradients may be added up in another order than without it. Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False} to have it replaced"
        )
    if any(module is not model for module in compiled_modules(model)):
        return "its layers are compiled one by one. Compile the whole model, or nothing, to have it replaced"
    return None
