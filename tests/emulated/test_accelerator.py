"""A device of which only torch.accelerator knows: the emulated card, with all that the package knows of CUDA taken away."""

from __future__ import annotations

import pytest

from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")


def test_an_accelerator_that_only_torch_knows_is_planned_in_requested_bytes() -> None:
    """As an XPU would be seen."""
    code = """
import torch
from lightning_memopt.device import backends, kinds
from lightning_memopt.device.accelerator import Accelerator
from lightning_memopt.device.cuda import Cuda
from tests.emulated.training import CUDA, train
torch.ones(1000, device=CUDA)
cuda, generic = Cuda(CUDA), Accelerator(CUDA)
for ask in ("total_nbytes", "free_nbytes", "statistics", "allocated", "generator_state_nbytes"):
    assert getattr(cuda, ask)() == getattr(generic, ask)(), ask
plain = train("dropout, tied weights", None)
del backends._OF_TYPE["cuda"], kinds._KINDS["cuda"]
backends.backend_of.cache_clear()
assert type(backends.backend_of(CUDA)) is Accelerator
found = train("dropout, tied weights", "min")
status = found.status
assert status.phase == "planned" and not status.deviates, status
assert found.same(plain)
assert found.requested < plain.requested
assert abs(found.requested - status.plan.predicted_peak_nbytes) <= 64 << 10, (found.requested, status.plan)
assert status.measured_peak_nbytes is not None and status.plan.predicted.reserved_nbytes == 0
"""
    device.lines_of(code)
