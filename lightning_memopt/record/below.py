"""Where rebuilds run: below autograd and autocast, without dispatch modes and hooks (R6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_memopt.record.levels import in_transform
from lightning_memopt.torch_private import (
    DispatchKey,
    DispatchKeySet,
    below_autograd_keys,
    dispatch_key,
    excluding_keys,
    no_dispatch_modes,
    set_grad_enabled,
    without_functorch,
)

_ABOVE = (
    DispatchKeySet(DispatchKey.AutocastCPU)
    | DispatchKeySet(DispatchKey.AutocastCUDA)
    | DispatchKeySet(dispatch_key("VmapMode"))  # of `autograd.grad(is_grads_batched=True)`: no draws
)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """No modes, no autograd, no autocast, no functorch, no saved-tensor hooks (they live above autograd).

    Calls run in it under their own grad mode; that of the caller is put back.
    """
    grad = torch.is_grad_enabled()
    with no_dispatch_modes(), below_autograd_keys(), excluding_keys(_ABOVE):
        try:
            with without_functorch() if in_transform() else contextlib.nullcontext():
                yield
        except GeneratorExit:  # a signal came right behind the entry: the caller, and its mode, were left before this
            grad = torch.is_grad_enabled()
            raise
        finally:
            set_grad_enabled(grad)
