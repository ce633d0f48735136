"""A model that is spread over two devices, and a device of which only torch.accelerator knows."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

_LOOP = """
import contextlib, torch
from torch import nn
from lightning_memopt import optimize

def part(device):
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]).to(device)

class Spread(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.on = part(first), part(second), second
    def forward(self, x):
        return self.second(self.first(x).to(self.on)).square().mean()

def train(first, second, budget):
    torch.manual_seed(0)
    model = Spread(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = dict(budget=budget, max_slowdown=float("inf"))
    seen, peaks, status = [], [], None
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, **options) as run:
        for _ in range(6):
            for card in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(card)
            loss = model(torch.randn(2048, 256, device=first))
            loss.backward()
            seen += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            del loss
            peaks = [torch.cuda.memory_stats(c)["requested_bytes.all.peak"] for c in range(torch.cuda.device_count())]
        status = None if run is None else run.status()
    return [*seen, *(p.detach().cpu() for p in model.parameters())], peaks, status
"""


def _run(code: str, **environment: str) -> str:
    done = device.run(
        [sys.executable, "-c", _LOOP + textwrap.dedent(code)], EMULATED_MODE="bits", EMULATED_RACES="1", **environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_model_on_two_cards_is_planned_on_its_first_and_says_so() -> None:
    """Each tensor is charged to its own card: what the plan predicts is what the first one measures."""
    said = _run(
        """
        plain, plain_peaks, _ = train("cuda:1", "cuda:0", None)
        found, peaks, status = train("cuda:1", "cuda:0", "min")
        assert status.phase == "planned" and not status.deviates, status
        assert len(plain) == len(found) and all(map(torch.equal, plain, found))
        assert peaks[0] == plain_peaks[0], "nothing is planned there"
        assert peaks[1] < plain_peaks[1] and abs(peaks[1] - status.plan.predicted_peak_nbytes) <= 64 << 10, (peaks, status.plan)
        """,
        EMULATED_DEVICES="2",
    )
    assert "parameters are on cuda:0 as well. The budget is that of cuda:1" in said and "race" not in said


def test_an_accelerator_that_only_torch_knows_is_planned_in_requested_bytes() -> None:
    """The emulated card, with all that the package knows of CUDA taken away: as an XPU would be seen."""
    _run(
        """
        from lightning_memopt.device import backends, kinds
        from lightning_memopt.device.accelerator import Accelerator
        from lightning_memopt.device.cuda import Cuda
        card = torch.device("cuda", 0)
        torch.ones(1000, device=card)
        cuda, generic = Cuda(card), Accelerator(card)
        for ask in ("total_nbytes", "free_nbytes", "statistics", "allocated", "generator_state_nbytes"):
            assert getattr(cuda, ask)() == getattr(generic, ask)(), ask
        plain, (plain_peak,), _ = train(card, card, None)
        del backends._OF_TYPE["cuda"], kinds._KINDS["cuda"]
        backends.backend_of.cache_clear()
        assert type(backends.backend_of(card)) is Accelerator
        found, (peak,), status = train(card, card, "min")
        assert status.phase == "planned" and not status.deviates, status
        assert len(plain) == len(found) and all(map(torch.equal, plain, found))
        assert peak < plain_peak and abs(peak - status.plan.predicted_peak_nbytes) <= 64 << 10, (peak, status.plan)
        assert status.measured_peak_nbytes is not None and status.plan.predicted.reserved_nbytes == 0
        """
    )
