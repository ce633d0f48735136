"""Steps that prove tiles where memory is short, and what they take for the head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.runtime.tiles import Proof
from lightning_memopt.session.tiling import Tiling
from tests.cpu.lib.engines import needs_native
from tests.cpu.tiles import test_loops
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, batches, compare

pytestmark = needs_native
_LOGITS = 256 * CLASSES * 4


class _Wide(LanguageModel):
    """The largest matrix is not that of the head, or there is a second head."""

    def __init__(self, wide, second):
        super().__init__()
        self.blocks[0] = torch.nn.Sequential(torch.nn.Linear(32, wide), torch.nn.GELU(), torch.nn.Linear(wide, 32))
        self.second = torch.nn.Linear(32, second, bias=False)

    def forward(self, ids, labels=None):
        x = self.hidden(ids)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return logits, loss + F.cross_entropy(self.second(x).flatten(0, 1), labels.view(-1).clamp(max=7))


@pytest.mark.parametrize(("wide", "second", "head"), [(CLASSES * 2, 8, "head"), (64, CLASSES * 2, "second")])
def test_a_first_step_takes_no_other_product_for_that_of_the_head(monkeypatch, wide, second, head):
    monkeypatch.setattr(Tiling, "_left_nbytes", lambda self: int(1.5 * _LOGITS))
    torch.manual_seed(1)
    model = _Wide(wide, second)
    ran = compare(test_loops.inside, model, profile_steps=1)
    assert ran.tiled
    (tiles,) = ran.status.plan.tiles
    assert (tiles.module, tiles.classes) == (head, model.get_submodule(head).out_features)


@pytest.mark.parametrize("left", (0.1, -1.0))
def test_a_loss_whose_scores_are_there_needs_no_more_memory(monkeypatch, left):
    monkeypatch.setattr(Tiling, "_left_nbytes", lambda self: int(left * _LOGITS))
    compare(test_loops.last_token, profile_steps=1)


def test_tiles_are_for_as_many_tokens_as_were_compared(monkeypatch):
    class Picking(LanguageModel):
        rows = 256

        def forward(self, ids, labels=None):
            return self.head(self.hidden(ids).flatten(0, 1)[: self.rows]), None

    def picking(model, optimizer, log, run):
        for step, (ids, labels) in enumerate(batches(9)):
            model.rows = 96 if step == 1 else 256  # the step that proves
            loss = F.cross_entropy(model(ids)[0], labels.flatten()[: model.rows])
            loss.backward()
            log.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    made, results = [], Proof.results
    monkeypatch.setattr(Proof, "results", lambda proof, n: made.append((proof.logits[0][0], n)) or results(proof, n))
    torch.manual_seed(1)
    compare(picking, Picking(), profile_steps=1)
    assert made
    assert all(compared == tokens for compared, tokens in made)


def test_a_proof_keeps_nothing_that_no_op_can_read(monkeypatch):
    proofs, results = [], Proof.results
    monkeypatch.setattr(Proof, "results", lambda proof, n: proofs.append(proof) or results(proof, n))

    def scaling(model, optimizer, log, run):
        for ids, labels in batches(4):
            logits, loss = model(ids, labels)
            loss.backward()
            logits.detach() * 2
            if run() is not None:
                kept.append([proof._last for proof in proofs])
            log.note(loss)
            del logits, loss
            optimizer.step()
            optimizer.zero_grad()
            if run() is not None:
                kept.append([proof._last for proof in proofs])

    kept = []
    compare(scaling, profile_steps=1)
    assert proofs
    assert not any(any(each) for each in kept)
