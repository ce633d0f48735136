"""Gradient checkpointing of transformers' layers, which a plan replaces.

A plan decides for every saved tensor, so checkpointing of whole layers beside it only takes time: the layers would run again,
whatever the budget. While a run lasts, the function that checkpoints a layer is replaced by one that calls the layer. All else
that a model does where checkpointing is on stays as it is, and the bits are the same: the user's checkpointing runs the same
ops again under the same generator states. With `use_reentrant=True` this is not certain. Then gradients of weights and tensors
that several layers share are added up in another order, and those of keyword arguments may be missing. So such layers are left
as they are.

All fronts do so, for models of any library that checkpoints as transformers does. Input: the model of a run, before its first
step. `LayerCheckpointing` needs no transformers: it looks for attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_memopt.integrations import transformers_private
from lightning_memopt.record import compiled_modules
from lightning_memopt.session import RunStatus


class _Called:
    """Stands in the place of a function that checkpoints, and calls the forward. A copy or pickle is that function."""

    __slots__ = ("checkpoint",)

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.checkpoint,)


def _same(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return checkpoint


class LayerCheckpointing:
    """The checkpointing of a model's layers, replaced from the construction of this object until `restore`.

    layers: names of the layers that ran under it; empty where nothing was replaced, or a model of old style does not say which.
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
        if why is not None:
            say(f"MemOpt: gradient checkpointing stays as it is, and a plan is made beside it: {why}.")
        elif functions:
            for module, function in functions.values():
                called = _Called(function)
                self._replaced.append((module, called))
                transformers_private.exchange_checkpointing_function(module, function, called)
            self.layers = tuple(name for name, (module, _) in functions.items() if transformers_private.is_layer(module))
            say("MemOpt: gradient checkpointing is replaced by the plan, until this run is over. The table says what it cost.")

    def look(self, status: Callable[[], RunStatus]) -> None:
        """Between two steps: let the layers be checkpointed again where it turned out that there will be no plan."""
        if not self._replaced:
            return
        now = status()
        if now.phase != "planned" and now.reason is not None:
            self.restore()
            self._say("MemOpt: gradient checkpointing is back, because there is no plan.")

    def restore(self) -> None:
        """Let the layers be checkpointed as before. May be called again."""
        while self._replaced:
            module, called = self._replaced.pop()
            transformers_private.exchange_checkpointing_function(module, called, called.checkpoint)


def _why_not(model: nn.Module, functions: list[Callable[..., Any]]) -> str | None:
    """Why checkpointing by these functions must stay, and what to do; None where it can be replaced."""
    if not functions:
        return None
    if not all(isinstance(function, partial) and function.keywords.get("use_reentrant") is False for function in functions):
        return (
            "with use_reentrant=True its gradients may be added up in another order than without it. Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False} to have it replaced"
        )
    if compiled_modules(model):
        return "nothing is rebuilt inside of compiled code. Train without torch.compile to have it replaced"
    return None
