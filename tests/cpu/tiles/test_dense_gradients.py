"""Losses whose gradients are not zero beside the target: they run in tiles of columns, too, with the bits of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.runtime.tiles.kinds import LogSoftmaxGradient
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, Loop, batches, by_step, compare
from tests.cpu.tiles.test_loops import inside, policy, preferred, smoothed

pytestmark = needs_tiles
_GRADIENT = torch.ops.aten._log_softmax_backward_data


@cache
def rounds_once() -> bool:
    """Whether the kernel of the softmax's backward multiplies and subtracts in one rounding on this machine, as `addcmul` does:
    else tiles of columns have other bits, and the gradient is whole.
    """
    torch.manual_seed(0)
    scores, g = torch.randn(64, CLASSES).log_softmax(1), torch.randn(64, CLASSES)
    wide, given = torch.zeros(64, CLASSES + 16), torch.full((64, CLASSES + 16), -0.0)
    given[:, :CLASSES] = g
    sums = -_GRADIENT(given, wide, 1, torch.float32)[:, -1:]
    wide[:, :CLASSES] = scores
    given[:] = -0.0
    given[:, -1] = 1
    exponentials = _GRADIENT(given, wide, 1, torch.float32)[:, :CLASSES]
    return torch.equal(torch.addcmul(g, exponentials, sums), _GRADIENT(g, scores, 1, torch.float32))


@cache
def runs_by_columns() -> bool:
    """Whether gradients of logits run in tiles of columns on this machine, where losses have one target a row, and others."""
    return compare(inside).status.plan.tiles[0].columns > 0 and rounds_once()


def by(loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Loop:
    """A loop that trains with a loss of (logits, ids, labels)."""
    loop = by_step(lambda step, *given: loss_of(*given))
    loop.__name__ = loss_of.__name__
    return loop


@by
def smoothed_by_hand(logits, ids, labels):
    """Label smoothing as the Trainer of transformers writes it."""
    scores = -F.log_softmax(logits, -1)
    labels = labels.unsqueeze(-1)
    ignored = labels.eq(-100)
    of_targets = scores.gather(-1, labels.clamp(min=0)).masked_fill_(ignored, 0.0)
    of_all = scores.sum(-1, keepdim=True, dtype=torch.float32).masked_fill_(ignored, 0.0)
    active = ignored.numel() - ignored.long().sum()
    return 0.9 * of_targets.sum() / active + 0.1 * of_all.sum() / (active * CLASSES)


@by
def focal(logits, ids, labels):
    """A focal loss: what is likely already counts less."""
    scores = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -((1 - scores.exp()).square() * scores).mean()


@by
def several(logits, ids, labels):
    """Three scores of each row are picked, of which two may be the same: their gradients are added up."""
    picked = torch.stack([ids, labels.clamp(min=0), ids.roll(3, 1)], -1)
    scores = logits.log_softmax(-1).gather(-1, picked)
    return -(scores * torch.tensor([1.0, 0.5, -0.25])).sum()


@by
def entropic(logits, ids, labels):
    """The entropy is a part of the loss: the gradient of each score depends on the score."""
    scores = logits.log_softmax(-1)
    return (scores.exp() * scores).sum(-1).mean()


@pytest.mark.parametrize("loop", (smoothed, smoothed_by_hand, preferred, focal, several, entropic))
def test_no_gradient_of_logits_is_whole(loop):
    ran = compare(loop)
    (tiles,) = ran.status.plan.tiles
    assert (tiles.columns > 0) == runs_by_columns(), ran.lines
    if tiles.columns:
        assert not {"aten::mm by columns", "aten::mm by rows"} & set(tiles.assembled)
        logits_nbytes = 4 * CLASSES * batches(1)[0][0].numel()
        whole = compare(loop, tile="off")
        assert ran.status.plan.predicted.peak_nbytes < whole.status.plan.predicted.peak_nbytes - 1.5 * logits_nbytes


def test_a_policy_loss_with_an_entropy_that_is_logged():
    ran = compare(policy)
    (tiles,) = ran.status.plan.tiles
    assert (tiles.columns > 0) == runs_by_columns()


def test_rows_of_which_all_gradients_are_zero_or_negative_zero():
    """Sums of zeros keep their sign, and so do gradients."""

    def masked(model, optimizer, log, run):
        for ids, labels in batches():
            weights = torch.where(ids % 3 == 0, torch.where(ids % 2 == 0, 0.0, -0.0), 1.0)[..., None]
            scores = model(ids)[0].log_softmax(-1)
            loss = -(scores * weights).sum(-1).mean() - scores.gather(-1, labels.clamp(min=0)[..., None]).mul(weights).mean()
            del scores
            loss.backward()
            log.note(loss)
            log.note(model.head.weight.grad.signbit())
            optimizer.step()
            optimizer.zero_grad()

    ran = compare(masked)
    assert ran.tiled, ran.lines


def test_a_head_with_a_bias_and_smoothed_labels():
    class Biased(LanguageModel):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(self.head.in_features, CLASSES)

    torch.manual_seed(1)
    ran = compare(smoothed, Biased())
    assert (ran.status.plan.tiles[0].columns > 0) == runs_by_columns(), ran.lines


@pytest.mark.parametrize("loop", (inside, smoothed, preferred))
def test_a_head_of_zeros_proves_nothing_that_later_steps_break(loop):
    """In bfloat16, tiles of columns give the bits of the kernel for logits of zeros, and for no others."""

    def warms_up(model, optimizer, log, run):
        rates = iter([0.0] * 4)
        optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(lr=next(rates, 1e-2)))
        loop(model, optimizer, log, run)

    torch.manual_seed(1)
    model = LanguageModel().to(torch.bfloat16)
    with torch.no_grad():
        model.head.weight.zero_()
    compare(warms_up, model)


def _smoothing(smoothed):
    """Trains for 18 steps, whose labels are smoothed where `smoothed(step)` says so."""

    def loss_of(step, logits, ids, labels):
        smoothing = 0.1 if smoothed(step) else 0.0
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    return by_step(loss_of, 18)


def test_columns_of_another_loss_are_not_taken_from_a_proof(monkeypatch):
    """Tiles of columns were compared for a loss with smoothed labels. Those of the loss that later steps have are wrong here,
    as they may be on another machine.
    """
    tile = LogSoftmaxGradient.tile

    def wrong(self, make, span):
        made = tile(self, make, span)
        return made * 2 if span.columns and self._loss is not None else made

    monkeypatch.setattr(LogSoftmaxGradient, "tile", wrong)
    assert compare(_smoothing(lambda step: step < 7)).tiled


def test_another_loss_runs_in_tiles_after_it_was_compared():
    ran = compare(_smoothing(lambda step: step >= 7))
    assert sum(" runs in tiles of " in line for line in ran.lines) == 2, ran.lines
    assert not ran.why_whole
    assert (ran.status.plan.tiles[0].columns > 0) == runs_by_columns()
