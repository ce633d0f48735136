"""Tell the tracer what is in memory before a forward begins: the tensors of the step, and all others on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memopt.graph.model import Kind
from lightning_memopt.native import counter
from lightning_memopt.record import Recorder, is_plain, storage_id
from lightning_memopt.trace.counted import Ledger
from lightning_memopt.trace.living import living
from lightning_memopt.trace.memory import requested_nbytes
from lightning_memopt.trace.tracer import Tracer


def adopt_all(tracer: Tracer, recorder: Recorder, tensors: Iterable[tuple[torch.Tensor, Kind, str]]) -> None:
    """Let the tracer adopt everything that is in memory before the forward begins.

    `tensors`: (tensor, kind, name) of parameters, buffers, gradients, optimizer state and the batch. With a ledger, and on
    CUDA, other memory is adopted too: storages that Python knows until they are freed, the rest until the end of the step.
    """
    recorder.capturing = False
    for t, kind, name in tensors:
        if not is_plain(t):  # sparse, nested, or made in inference mode: the recorder ignores such tensors
            continue
        version = recorder.of_storage.get(storage_id(t))
        if version is None:
            version = recorder.adopt(t)
            recorder.tape.versions[version.id] = version
            tracer.adopt(version, kind, name)
    if tracer.device.type == "cuda":
        known = sum(version.nbytes for version in recorder.tape.versions.values() if version.device.type == "cuda")
        tracer.adopt_unseen(max(0, requested_nbytes(tracer.device)[0] - known))
    elif tracer.ledger is not None:
        _bystanders(tracer, recorder, tracer.ledger)
    recorder.capturing = True


def others_nbytes(tracer: Tracer, recorder: Recorder) -> int:
    """Bytes on the CPU that belong to no tensor of the step (another model, tensors of the loop), if the tracer has no ledger.

    0 with a ledger, which adopts them, and without the native counter.
    """
    counts = counter() if tracer.device.type == "cpu" and tracer.ledger is None else None
    if counts is None:
        return 0
    storages = (version.alive() for version in recorder.tape.versions.values() if version.device.type == "cpu")
    known = sum(s.nbytes() for s in storages if s is not None and counts.counts(s))
    return max(0, counts.live_nbytes - known)


def _bystanders(tracer: Tracer, recorder: Recorder, ledger: Ledger) -> None:
    """Adopt the storages that the step does not know, and the live bytes that Python does not know."""
    for storage in living(tracer.device):
        if storage._cdata not in recorder.of_storage and ledger.counter.counts(storage):
            tracer.adopt_bystander(storage)
    tracer.adopt_unseen(max(0, ledger.settle()))
