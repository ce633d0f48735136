"""Batch sizes on CUDA, on a device that torch holds to a share of its memory: no error, and nearly the largest that can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching.choose import largest
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.models import Noisy

LIMIT_NBYTES = 1 << 30
WIDTH, ROWS = 1024, 512


@pytest.fixture
def limited() -> Iterator[None]:
    """The allocator raises torch's own error above the limit."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(LIMIT_NBYTES / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Loop:
    """A plain loop over batches of `size` samples of `ROWS` rows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Noisy(WIDTH, 8).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def make(self, size: int) -> Tensor:
        return torch.ones(size * ROWS, WIDTH, device="cuda").cumsum(0).sin().view(size, ROWS, WIDTH)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fits(self, size: int, steps: int = 3) -> bool:
        torch.cuda.empty_cache()
        try:
            for _ in range(steps):
                self.step(self.make(size))
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            return False
        return True

    def state(self) -> list[Any]:
        parameters = [p.detach().clone() for p in self.model.parameters()]
        return [*parameters, *self.model.buffers(), torch.cuda.get_rng_state(), torch.get_rng_state()]


def test_within_2_percent_of_the_largest_and_nothing_touched(limited: None) -> None:
    loop = Loop()
    before = loop.state()
    found = find_max_batch_size(loop.step, loop.make, loop.model, loop.optimizer, budget=LIMIT_NBYTES, planned=False)
    assert all(map(same_bits, before, loop.state())) and not loop.optimizer.state
    assert found.trial_steps <= 2 and found.confirmed_peak_nbytes is not None and found.confirmed_peak_nbytes <= LIMIT_NBYTES
    assert loop.fits(found.size)
    assert found.size >= 0.98 * largest(lambda size: not loop.fits(size), 0, found.size, 2 * found.size)


def test_plans_make_it_larger(limited: None) -> None:
    """The size that was found trains inside `optimize`, within the limit, as the plain loop would, were there memory."""
    loop = Loop()
    unmodified = find_max_batch_size(loop.step, loop.make, loop.model, loop.optimizer, budget=LIMIT_NBYTES, planned=False)
    found = find_max_batch_size(loop.step, loop.make, loop.model, loop.optimizer, budget=LIMIT_NBYTES)
    assert found.size > unmodified.size and found.trial_steps <= 2
    with optimize(loop.model, loop.optimizer, budget=LIMIT_NBYTES, verbose=False) as run:
        assert loop.fits(found.size, steps=6)
    status: Any = run.status()
    assert not status.deviates and status.measured_peak_nbytes <= LIMIT_NBYTES
