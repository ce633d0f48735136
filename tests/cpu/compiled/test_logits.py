"""Logits that are made in compiled code: a line says that they are whole, and its remedy works."""

from __future__ import annotations

import pytest
import torch

from lightning_memopt import optimize
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import LanguageModel, batches

pytestmark = needs_tiles


def _lines(model: torch.nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lines: list[str] = []
    with optimize(model, optimizer, budget="min", verbose=False) as run:
        run.session.say = lines.append
        run.session._tiling._say = lines.append
        for ids, labels in batches(9):
            loss = model(ids, labels)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines


@pytest.mark.parametrize("whole", (True, False), ids=("the model is compiled", "its blocks are compiled"))
def test_a_compiled_head_is_whole_and_a_line_says_so(whole: bool) -> None:
    torch.manual_seed(1)
    model = LanguageModel()
    for module in (model,) if whole else model.blocks:
        module.compile()
    lines = _lines(model)
    why = [line for line in lines if line.startswith("MemOpt: no loss head runs in tiles: ")]
    assert why == (
        [
            "MemOpt: no loss head runs in tiles: 2.00 MiB of logits are made in compiled code. Compile the other layers "
            "alone (compile=True compiles repeated blocks), and the last one runs in tiles"
        ]
        if whole
        else []
    )
    assert any(" runs in tiles of " in line for line in lines) != whole


class _Wide(torch.nn.Module):
    """A compiled block whose wide product is no logits: it is added to something, or goes through an activation."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 4096, bias=False)
        self.down = torch.nn.Linear(4096, 8, bias=False)
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        if self.added:
            return wide + x.repeat(1, 512)
        return x + self.down(torch.nn.functional.gelu(wide))


@pytest.mark.parametrize("added", (True, False), ids=("it is added", "an activation reads it"))
def test_a_wide_product_that_no_softmax_reads_is_not_taken_for_logits(added: bool) -> None:
    torch.manual_seed(1)
    model = _Wide(added)
    model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lines: list[str] = []
    with optimize(model, optimizer, budget="min", verbose=False) as run:
        run.session.say = lines.append
        run.session._tiling._say = lines.append
        for _ in range(6):
            model(torch.randn(256, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert lines
    assert not [line for line in lines if "logits are made in compiled code" in line]
