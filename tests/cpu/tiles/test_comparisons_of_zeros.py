"""Steps in which a comparison of tiles proves nothing, because all numbers are alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, batches, compare

pytestmark = needs_tiles


def _ignoring(first, steps=12):
    """Trains for so many steps, in the first of which all labels are ignored: the gradient of the logits is zero."""

    def train(model, optimizer, log, run):
        for step, (ids, labels) in enumerate(batches(steps)):
            labels = torch.full_like(labels, -100) if step < first else labels
            loss = F.cross_entropy(model(ids)[0].view(-1, CLASSES), labels.view(-1), reduction="sum")
            loss.backward()
            log.note(loss)
            phase = "" if run() is None else run().session._tiling._now.phase
            phases.append(phase)
            optimizer.step()
            optimizer.zero_grad()

    phases = []
    train.phases = phases
    return train


def test_a_gradient_of_zeros_proves_nothing():
    """Zeros add up to the same bits in any order, so tiles are compared again in a step whose gradients vary."""
    zeros, none = _ignoring(6), _ignoring(0)
    ran, at_once = compare(zeros), compare(none)
    assert ran.tiled, ran.lines
    assert at_once.tiled
    proofs = [loop.phases[12:].count("prove") for loop in (zeros, none)]
    assert proofs[0] == proofs[1] + 5, (zeros.phases, none.phases)
    assert sum("tiles are compared again in the next step" in line for line in ran.lines) == 1


def test_a_head_that_stays_zero_stays_whole():
    torch.manual_seed(1)
    model = LanguageModel()
    with torch.no_grad():
        model.head.weight.zero_()
    model.head.weight.requires_grad = False
    ran = compare(_ignoring(0, 40), model)
    assert not ran.tiled
    (why,) = ran.why_whole
    assert "added up only zeros, nan or too few numbers in 32 steps, which proves nothing" in why, why
