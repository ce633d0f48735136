"""Offload all saved tensors through a separate stream, after torchtune's `OffloadActivations`.

Saved tensors of a CUDA device are copied to pinned host memory on a second stream. At most two copies are under way at once,
which bounds the bytes that are in memory twice. Each is copied back when backward asks for it. torchtune also fetches ahead;
this code does not. Source: torchtune, `OffloadActivations` (2024).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from lightning_memopt.device.backends import backend_of, current_stream
from lightning_memopt.device.places import on_host

_LEAST_NBYTES = 1024
_UNDER_WAY = 2


class StreamedOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context in which autograd saves tensors of `device` in pinned host memory. Parameters stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._streams = backend_of(device).streams
        self._stream = self._streams.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        super().__init__(self._pack, self._unpack)

    def __exit__(self, *error: Any) -> None:
        self._leaving.clear()
        super().__exit__(*error)

    def _pack(self, t: torch.Tensor) -> Any:
        if on_host(t.device) or t.nbytes < _LEAST_NBYTES or isinstance(t if t._base is None else t._base, torch.nn.Parameter):
            return t
        host = torch.empty_like(t, device="cpu", pin_memory=True)
        self._stream.wait_stream(current_stream(t.device))
        with self._streams.stream(self._stream):
            host.copy_(t, non_blocking=True)
            event = self._streams.Event()
            event.record()
        t.record_stream(self._stream)
        self._leaving.append((t, event))
        while len(self._leaving) > _UNDER_WAY:
            self._leaving.popleft()[1].synchronize()
        return host, t.device, event

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, device, event = packed
        self._stream.wait_event(event)
        with self._streams.stream(self._stream):
            back: torch.Tensor = host.to(device, non_blocking=True)
        current = current_stream(device)
        current.wait_stream(self._stream)
        back.record_stream(current)
        return back
