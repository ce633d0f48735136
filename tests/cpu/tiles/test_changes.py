"""Loops that change after tiles were compared: what was not compared is whole, and equal to the bit. Tiles of what changes are
wrong in most of these tests, as they may be on another machine.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.runtime.tiles.exits import Product
from lightning_memopt.runtime.tiles.kinds import Pointwise
from lightning_memopt.runtime.tiles.kinds import Product as Logits
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import CLASSES, batches, by_step, compare

pytestmark = needs_tiles
_CHANGES = 9
"""The step from which on a loop does something else."""


def _by(loss_of, within=lambda step: contextlib.nullcontext()):
    """A loop with a loss of (logits, labels, whether it has changed)."""

    def of_step(step, logits, ids, labels):
        return loss_of(logits.flatten(0, 1), labels.flatten(), step >= _CHANGES)

    return by_step(of_step, 16, within, notes_gradient=True)


def test_the_power_of_an_op_is_part_of_what_was_compared(monkeypatch):
    tile = Pointwise.tile

    def wrong(self, make, span):
        made = tile(self, make, span)
        return made * 2 if self.func is torch.ops.aten.pow.Tensor_Scalar and 6 in self.args else made

    def loss_of(logits, labels, changed):
        scores = F.log_softmax(logits, -1)
        return F.nll_loss(scores, labels) + 1e-3 * scores.pow(6 if changed else 3).mean(-1).mean().abs()

    monkeypatch.setattr(Pointwise, "tile", wrong)
    assert compare(_by(loss_of)).tiled


@pytest.mark.filterwarnings("ignore:.*left the plan")
def test_another_dtype_is_compared_anew(monkeypatch):
    tile = Logits.tile

    def wrong(self, make, span):
        made = tile(self, make, span)
        return made * 1.5 if made.dtype == torch.bfloat16 else made

    monkeypatch.setattr(Logits, "tile", wrong)

    def within(step):
        return torch.autocast("cpu", torch.bfloat16, enabled=step >= _CHANGES)

    assert compare(_by(lambda logits, labels, changed: F.cross_entropy(logits, labels), within)).tiled


def test_a_product_with_another_matrix_is_compared_anew(monkeypatch):
    into, others = Product.into, torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(5)) / CLASSES

    def wrong(self, out, span):
        into(self, out, span)
        if self._other.size(1) == 8:
            out.mul_(1.5)

    def loss_of(logits, labels, changed):
        scores = F.log_softmax(logits, -1)
        loss = F.nll_loss(scores, labels) - 0.01 * (scores.exp() * scores).sum(-1).mean()
        return loss + (scores.exp() @ others).square().mean() if changed else loss

    monkeypatch.setattr(Product, "into", wrong)
    assert compare(_by(loss_of)).tiled


def test_a_sum_of_one_number_proves_nothing(monkeypatch):
    """One label of the first steps counts. Tiles of columns add up in another order."""

    def backwards(self, out, made):
        if self.columns:
            torch.mm(made.flip(0).t(), self._other.flip(0), out=out)
        else:
            torch.mm(made, self._other, out=out)

    def loss_of(logits, labels, changed):
        if not changed:
            labels = torch.where(torch.arange(len(labels)) == 5, labels, -100)
        return F.cross_entropy(logits, labels)

    monkeypatch.setattr(Product, "_write", backwards)
    ran = compare(_by(loss_of))
    assert any("tiles are compared again in the next step" in line for line in ran.lines)


@pytest.mark.parametrize("count", (lambda logits: (logits > 0).sum((0, 1)), lambda logits: logits.isnan().sum((0, 1))))
def test_counts_over_all_tokens(count):
    """The sum of bools is one of integers, whose order does not matter: zeros show as much as others."""

    def train(model, optimizer, log, run):
        for ids, labels in batches(12):
            logits, loss = model(ids, labels)
            log.note(count(logits))
            del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    ran = compare(train)
    assert ran.tiled
    assert not any("compared again" in line for line in ran.lines)


@pytest.mark.parametrize("every", (1, 2))
def test_settings_that_are_others_at_the_update_end_in_a_plan(every):
    """The numeric settings of a forward count, not those of the update; and those of each second step are compared anew only a
    few times.
    """

    def train(model, optimizer, log, run):
        try:
            for step, (ids, labels) in enumerate(batches(24)):
                torch.set_float32_matmul_precision("highest" if step % every else "high")
                loss = model(ids, labels)[1]
                loss.backward()
                log.note(loss)
                torch.set_float32_matmul_precision("highest")
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_float32_matmul_precision("highest")

    ran = compare(train)
    assert ran.status.plan is not None
    assert ran.tiled == (every == 1)
