"""Several compiled regions in a step, and one that is called several times: one budget for them and the eager code between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memopt.session.regions.compiled_regions import CompiledRegions
from tests.cpu.compiled.training import Forward, keeping_all, train


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(48, inner), nn.Linear(inner, inner), nn.Linear(inner, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.middle(functional.gelu(self.inner(x))))
        return x + functional.dropout(self.outer(h), 0.1, self.training)


class Blocks(nn.Module):
    """Compiled blocks with eager code between them. Blocks of the same width are calls of one region."""

    def __init__(self, *inner: int, backend: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in inner)
        for block in self.blocks:
            block.compile(backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x)) * 1.5
        return x.square().mean()


def made(*inner: int, backend: str = "inductor") -> tuple[nn.Module, Forward]:
    model = Blocks(*inner, backend=backend)
    return model, model


def test_two_regions_and_the_eager_code_between_them_keep_one_budget() -> None:
    def two() -> tuple[nn.Module, Forward]:
        return made(64, 96, backend="aot_eager")

    keeps, smallest = keeping_all(two), train(two, "min")
    assert len(smallest.options) == 2
    budget = (smallest.nbytes + smallest.unmodified_nbytes) // 2
    within = train(two, budget)
    assert smallest.nbytes < within.nbytes <= budget < keeps.nbytes
    assert smallest.has_bits_of(keeps)
    assert within.has_bits_of(keeps)
    assert "of 2 compiled regions run ops again" in smallest.text


def test_a_region_that_is_called_for_each_layer_counts_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers: two regions, because only the first reads a batch that needs no gradient. The first try is modelled well."""
    seen: list[tuple[int, int]] = []
    whole = CompiledRegions.compiled_again

    def spied(self: CompiledRegions, *args: Any) -> bool:
        again = whole(self, *args)
        seen[:] = [(m.modelled_nbytes, m.peak_nbytes) for m in self._now.choice.measured]
        return again

    monkeypatch.setattr(CompiledRegions, "compiled_again", spied)

    def six() -> tuple[nn.Module, Forward]:
        return made(*[96] * 6)

    keeps = keeping_all(six)
    (modelled, peak), (modelled_after, peak_after) = seen[:2]
    assert abs((modelled_after - modelled) - (peak_after - peak)) <= 0.1 * (peak_after - peak)
    smallest = train(six, "min")
    within = train(six, int(1.02 * smallest.nbytes))  # the first forward does not show how often code runs: not refused
    assert within.nbytes <= 1.02 * smallest.nbytes
    assert within.has_bits_of(keeps)
    assert len(smallest.options) == 2
    assert smallest.nbytes < smallest.unmodified_nbytes < keeps.nbytes
    assert smallest.has_bits_of(keeps)
