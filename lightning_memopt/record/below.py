"""Where rebuilds run: below autograd and autocast, without dispatch modes and hooks (R6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_memopt.record.levels import in_transform

_ABOVE = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))  # of `autograd.grad(is_grads_batched=True)`: no draws
)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """No modes, no autograd, no autocast, no functorch, no saved-tensor hooks (they live above autograd).

    Calls run in it under their own grad mode; that of the caller is put back.
    """
    grad = torch.is_grad_enabled()
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_ABOVE):
        try:
            with temporarily_clear_interpreter_stack() if in_transform() else contextlib.nullcontext():
                yield
        finally:
            torch._C._set_grad_enabled(grad)
