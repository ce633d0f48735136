"""Tell the tracer what is in memory before a forward begins: the tensors of the step, and how many other bytes there are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_on
from lightning_memopt.graph.model import Kind
from lightning_memopt.record import Recorder, is_plain, storage_id
from lightning_memopt.record.tensors import has_plain_bytes
from lightning_memopt.trace.tracer import Tracer


def adopt_all(
    tracer: Tracer, recorder: Recorder, tensors: Iterable[tuple[torch.Tensor, Kind, str]], away_nbytes: int = 0
) -> None:
    """Let the tracer adopt everything that is in memory before the forward begins.

    `tensors`: (tensor, kind, name) of parameters, buffers, gradients, optimizer state and the batch. With a ledger, and on
    CUDA, the bytes of all other memory are adopted, too. `away_nbytes`: bytes of these tensors that are not on the device now,
    but in a tier.
    """
    recorder.capturing = False
    for t, kind, name in tensors:
        if not (is_plain(t) or has_plain_bytes(t)):  # sparse, nested, or made in inference mode: they are not recorded
            continue
        version = recorder.of_storage.get(storage_id(t))
        if version is None:
            version = recorder.adopt(t)
            if kind == "optimizer_state" and not version.nbytes:
                version.nbytes = t.nbytes  # it is in a tier, and its storage is empty
            recorder.tape.versions[version.id] = version
            tracer.adopt(version, kind, name)
    backend = backend_of(tracer.device)
    if backend.keeps_statistics:
        known = sum(version.nbytes for version in recorder.tape.versions.values() if is_on(tracer.device, version.device))
        in_use = frozenset(
            block["address"]
            for segment in backend.segments() or ()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        tracer.adopt_unseen(max(0, backend.statistics().nbytes - (known - away_nbytes)), in_use)
    elif tracer.ledger is not None:
        tracer.ledger.settle()
    recorder.capturing = True
