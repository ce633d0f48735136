"""A head with a bias: its gradient is a sum over all rows, in tiles of columns."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.runtime.tiles import Proof, TileMode
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, compare
from tests.cpu.tiles.test_loops import inside, outside, smoothed

pytestmark = needs_tiles
ROWS, WIDTH = 96, 48
SUM = "aten::sum.dim_IntList by columns"


def added(x, w, bias):
    """As a sequence of texts, and a parameter of its own."""
    return (F.linear(x.unflatten(0, (4, -1)), w) + bias).flatten(0, 1)


@pytest.mark.parametrize("head", (F.linear, added))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_its_gradient_has_the_bits_of_the_whole_sum(dtype, head):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(CLASSES, WIDTH, generator=generator) * 0.2
    bias = torch.randn(CLASSES, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)

    def gradients(work):
        parameters = [t.to(dtype, copy=True).requires_grad_() for t in (x, w, bias)]
        mode = TileMode(CLASSES, work, notes=True)
        with contextlib.ExitStack() as stack:
            if work is not None:
                mode.inside = True
                mode.enter()
                stack.callback(mode.leave)
                stack.callback(mode.end)
            F.cross_entropy(head(*parameters).float(), target).backward()
        return mode, [p.grad for p in parameters]

    proof = Proof((16, 48), (256, 512))
    _, plain = gradients(None)
    _, proven = gradients(proof)
    assert all(map(torch.equal, plain, proven))
    for sizes in proof.results(ROWS):
        assert SUM in sizes.ops | sizes.assembled
        mode, tiled = gradients(sizes)
        assert all(map(torch.equal, plain, tiled)) and not mode.outcome.read


def test_a_model_whose_head_has_one():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head = torch.nn.Linear(32, CLASSES)
    (head,) = compare(inside, model).status.plan.tiles
    assert SUM in {*head.ops, *head.assembled}, "it was compared by columns"


@pytest.mark.parametrize("loop", (outside, smoothed))
def test_a_bias_of_its_own_beside_a_frozen_head(loop):
    """No loss has noted what tiles of columns need, because the head has no gradient."""

    class Biased(LanguageModel):
        def __init__(self):
            super().__init__()
            self.head.weight.requires_grad_(False)
            self.bias = torch.nn.Parameter(torch.zeros(CLASSES))

        def forward(self, ids, labels=None):
            return self.head(self.hidden(ids)) + self.bias, None

    torch.manual_seed(1)
    (head,) = compare(loop, Biased()).status.plan.tiles
    assert SUM in {*head.ops, *head.assembled}
