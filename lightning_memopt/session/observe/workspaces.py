"""Let cuBLAS take its workspaces, and checksums their weights, before a step is observed.

Torch gives cuBLAS a workspace for each handle and stream (32 MiB on an H100) and keeps it for good. Handles belong to threads:
the thread of the forward has one, and autograd's thread of the device another. Without this, the first product of the observed
step takes it, as if it were the op's own, and a plan does not count it in the rest of the step. The weights of checksums stay
for good, too (0.5 MiB).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import current, on_host
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.engine.rebuild import checksum_weights
from lightning_memopt.session.observe.costs import in_own_thread
from lightning_memopt.torch_private import no_torch_functions

_SIDE = 16
_of_thread = threading.local()
"""`taken`: (device, stream) for which this thread has run a product."""


def take_workspaces(model: nn.Module, device: torch.device) -> None:
    """Off the host, make the weights of checksums. On CUDA, run a product in this thread and in autograd's, once for each
    stream, if the model has a matrix.
    """
    if on_host(device):
        return
    with current(device), below_autograd(), no_torch_functions():
        checksum_weights(device)
    backend = backend_of(device)
    if not backend.keeps_workspaces or not any(p.dim() == 2 for p in model.parameters()):
        return
    stream = backend.current_stream()
    taken: set[tuple[int | None, int]] = vars(_of_thread).setdefault("taken", set())
    key = device.index, stream.stream_id
    if key in taken:
        return
    taken.add(key)
    with current(device), below_autograd(), no_torch_functions():
        _multiply(device)

    def in_backward() -> None:
        with backend.streams.stream(stream):  # the nodes of a backward run on the streams of their forward
            _MultipliesInBackward.apply(torch.ones(_SIDE, device=device, requires_grad=True)).sum().backward()

    in_own_thread(in_backward, device)


def _multiply(device: torch.device) -> None:
    square = torch.ones(_SIDE, _SIDE, dtype=torch.float32, device=device)
    torch.mm(square, square)


class _MultipliesInBackward(torch.autograd.Function):
    """The same values. A new thread would have a handle, and a workspace, of its own for a product in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _multiply(grads[0].device)
        return grads[0]
