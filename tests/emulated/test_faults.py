"""State, gradients and frozen weights in the host's memory: copies that are interrupted, memory that cannot be locked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_memopt.runtime import parked_gradients, weight_memory
from lightning_memopt.runtime.tiers import streams
from tests.cpu.parking.test_faults_at_rest import MIN, Faults, Trained
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

COPIES = (streams, "copy"), (parked_gradients, "copy"), (weight_memory, "copy")
HOST: dict[str, Any] = MIN | {"offload": "host"}
trained = partial(Trained, device="cuda", width=2048)


def interrupted(n: int, after: bool) -> tuple[Trained, int]:
    """A run in which the n-th copy is interrupted, and how many there were."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, COPIES, KeyboardInterrupt, n, after=after)
        return trained(faults, **HOST), faults.count


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_a_copy_loses_nothing(after: bool) -> None:
    plain, before = trained().bits, device.races()
    whole, count = interrupted(0, after)
    assert whole.bits == plain and whole.parked == {"state", "gradient", "weight"} and count > 20
    for n in range(1, min(count + 1, 120), 20):
        found, _ = interrupted(n, after)
        assert found.bits == plain and found.again == 1, n
    assert device.races() == before


def test_memory_that_cannot_be_page_locked() -> None:
    """Gradients and frozen weights stay on the device, and lines say what to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_lock", lambda *_: False)
        found = trained(**HOST)
    assert found.bits == trained().bits
    assert "gradients that the plan parks stay on the device" in found.said and "raise `ulimit -l`" in found.said
    assert "weights that the plan parks stay on the device" in found.said
