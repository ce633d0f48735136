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
    """Within, there are no modes, no autograd, no autocast, no functorch and no saved-tensor hooks (they live above autograd).

    Recorded calls run under the grad mode recorded with them. Afterwards the caller's grad mode is restored.
    """
    grad = torch.is_grad_enabled()
    with no_dispatch_modes(), below_autograd_keys(), excluding_keys(_ABOVE):
        try:
            with without_functorch() if in_transform() else contextlib.nullcontext():
                yield
        except GeneratorExit:  # a signal came right after the entry: the caller has already been left, and its mode restored
            grad = torch.is_grad_enabled()
            raise
        finally:
            set_grad_enabled(grad)
