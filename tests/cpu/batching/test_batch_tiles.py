"""The batch size of a language model whose loss head runs in tiles."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor, nn

from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching import BatchSizeResult
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.loops import QUIET
from tests.cpu.lib.scripts import ROOT
from tests.cpu.tiles.language_model import CLASSES, TOKENS, LanguageModel

pytestmark = needs_tiles
_BUDGET = 16 << 20


def batch(size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, CLASSES, (size, TOKENS), generator=torch.Generator().manual_seed(7))
    return ids, ids.roll(-1, 1)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = LanguageModel()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, given: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(*given)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def found(tile: str) -> BatchSizeResult:
    model, optimizer = made()
    return find_max_batch_size(
        lambda given: step(model, optimizer, given), batch, model, optimizer, budget=_BUDGET, start=2, tile=tile
    )


def test_a_size_that_fits_in_tiles_is_predicted_confirmed_and_trained_at() -> None:
    """In a process of its own: what other tests have left counts for a budget, and may be freed between two steps."""
    check = f"from {__name__} import check; check()"
    ran = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def check() -> None:
    whole, tiled = found("off"), found("exact")
    assert tiled.size > 8 * whole.size
    assert not tiled.why, "the first prediction was right"
    assert tiled.confirmed_peak_nbytes is not None and tiled.predicted_peak_nbytes is not None
    assert 0.9 * _BUDGET < tiled.confirmed_peak_nbytes <= _BUDGET
    # tiles have multiples of 64 rows, which no line through two sizes has
    assert abs(tiled.confirmed_peak_nbytes - tiled.predicted_peak_nbytes) < 256 << 10

    def trained(**options: str) -> list[Tensor]:
        model, optimizer = made()
        if not options:
            return [step(model, optimizer, batch(tiled.size)) for _ in range(7)]
        with optimize(model, optimizer, budget=_BUDGET, **QUIET, **options) as run:
            losses = [step(model, optimizer, batch(tiled.size)) for _ in range(7)]
            status = run.status()
        assert status.plan is not None and status.plan.tiles
        assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= _BUDGET
        return losses

    assert all(map(torch.equal, trained(), trained(tile="exact")))
