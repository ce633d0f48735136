"""What `fit_only` asks about: steps that a front runs, of a model that exists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.batching import untouched
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.fitting.loops import of_loop
from lightning_memopt.graph import Graph
from lightning_memopt.integrations.asking import refuse_elsewhere
from lightning_memopt.plan import read_plan
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.harness import same_bits
from tests.cpu.tiles.language_model import LanguageModel, batches


def asked(model: nn.Module, device: str, nbytes: int | None) -> Any:
    """The answer for two steps of Adam, which end as they began."""
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(256, 64)

    def observe(config: MemOptConfig) -> tuple[Graph | None, str]:
        with optimize(model, optimizer, config=config) as run:
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return run.session.observed_graph, ""

    answer = of_loop("net", observe, lambda most: untouched(model, optimizer, most_nbytes=most), device, nbytes)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    return answer


@pytest.mark.parametrize("width", [64, 4096], ids=["computed", "not computed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_of_any_size_is_as_before(width: int, device: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64))
    before = [p.detach().clone() for p in model.parameters()]
    answer, blocks = asked(model, device, 1 << 30), kind_of(device).allocated_nbytes
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert answer.fits and answer.purposes["weights"] == sum(blocks(p.nbytes) for p in model.parameters())
    assert answer.cards[0].usable_nbytes == 1 << 30 and answer.cards[0].card == "a budget of 1.00 GiB"
    if device == "cuda":
        assert "outside the step" not in answer.purposes, "the host's"
    answer.save_plan(str(tmp_path / "plan.json"))
    assert read_plan(tmp_path / "plan.json")[1].device == device


@needs_tiles
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_head_in_tiles(device: str) -> None:
    model, (ids, labels) = LanguageModel(), batches(1)[0]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters())

    def observe(config: MemOptConfig) -> tuple[Graph | None, str]:
        with optimize(model, optimizer, config=config) as run:
            for _ in range(2):
                model(ids, labels)[1].backward()
                optimizer.step()
                optimizer.zero_grad()
            return run.session.observed_graph, ""

    def within(most: int) -> Any:
        return untouched(model, optimizer, most_nbytes=most)

    without, answer = (of_loop("net", observe, within, device, 1000, tile=tile) for tile in ("off", "exact"))
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True)) and not optimizer.state
    assert answer.smallest_nbytes < without.smallest_nbytes and [head.module for head in answer.cards[0].tiles] == ["head"]


def test_the_smallest_budget() -> None:
    assert asked(nn.Linear(64, 64), "cpu", None).cards[0].card == "a budget of any size"


def test_a_model_on_a_device_is_refused() -> None:
    refuse_elsewhere(nn.Linear(2, 2))
    there: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(device="cuda:0")], buffers=list)
    with pytest.raises(UnsupportedError, match=r"the model is on cuda:0 already. Leave it on the CPU \(use_cpu=True\)"):
        refuse_elsewhere(there)
