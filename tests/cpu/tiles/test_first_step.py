"""Steps that prove tiles where memory is short, and what they take for the head."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.native import counter
from lightning_memopt.native.counting import install
from lightning_memopt.runtime.tiles import Proof
from lightning_memopt.session.tiling import Tiling
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.inside import states_of
from tests.cpu.tiles import test_loops
from tests.cpu.tiles.language_model import BATCH, CLASSES, LanguageModel, Picking, batches, compare, picking

pytestmark = needs_tiles
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
    made, results = [], Proof.results
    monkeypatch.setattr(Proof, "results", lambda proof, n: made.append((proof.logits[0][0], n)) or results(proof, n))
    torch.manual_seed(1)
    compare(picking(lambda step: 96 if step == 1 else 256), Picking(), profile_steps=1)  # the second step proves
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


def _peaks(of):
    """The loop `inside`, which notes the peak of each step of its second run: the one in tiles."""

    def train(model, optimizer, log, run):
        for ids, labels in batches(9):
            window = counter().window()
            loss = model(ids, labels)[1]
            loss.backward()
            log.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            if run() is not None:
                of.append(window.peak_nbytes)
            window.close()

    return train


@pytest.mark.parametrize(("left", "rows"), [(100, 0), (3, 0), (1.5, 160), (0.6, 32)])
@pytest.mark.parametrize("frozen", (False, True))
def test_a_first_step_whose_logits_do_not_fit_proves_tiles_on_what_fits(monkeypatch, left, rows, frozen):
    if install() is None:
        pytest.skip("nothing counts without a compiler")
    proofs, peaks = [], []
    results = Proof.results
    monkeypatch.setattr(Proof, "results", lambda proof, tokens: proofs.append(proof) or results(proof, tokens))
    monkeypatch.setattr(Tiling, "_left_nbytes", lambda self: int(left * _LOGITS))
    torch.manual_seed(1)
    model = LanguageModel()
    model.head.weight.requires_grad_(not frozen)
    ran = compare(_peaks(peaks), model, profile_steps=1)
    assert ran.tiled
    assert {proof.compared for proof in proofs} == {rows}
    assert any(f"for {rows} of 256 rows" in line for line in ran.lines) == bool(rows)
    fits = left > 4  # then the first step ran as it is, and the second one proved
    assert len([line for line in ran.lines if "observing" in line]) == 3 + fits - frozen
    if left < 1 and frozen:  # of a trained head, one way has a whole gradient
        assert max(peaks) < peaks[-1] + _LOGITS // 4


def test_an_op_on_some_rows_is_compared_on_as_many_as_fit_and_it_has(monkeypatch):
    """The loss reads fewer rows than the logits have. After a step, a proof holds nothing."""
    proofs = []
    results = Proof.results
    monkeypatch.setattr(Proof, "results", lambda proof, tokens: proofs.append(proof) or results(proof, tokens))
    for nbytes in (3.9 * _LOGITS, 0.6 * _LOGITS):
        monkeypatch.setattr(Tiling, "_left_nbytes", lambda self, nbytes=nbytes: int(nbytes))
        assert compare(test_loops.shifted).tiled
    assert proofs
    assert not any(proof._last for proof in proofs)


def test_each_batch_of_a_step_has_a_head_of_its_own():
    """Batches of two lengths accumulate. Each is observed in the steps that begin with it, and the plans are for its tokens."""

    def mixed(model, optimizer, log, run):
        for step, (ids, labels) in enumerate(batches(24)):
            lengths = ((64, 32), (32, 64), (64,), (32,))[step % 4]
            for length in lengths:
                loss = model(ids[:, :length], labels[:, :length].contiguous())[1]
                loss.backward()
                log.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            if run() is not None:
                of_state.append({signature: state for signature, state in states_of(run()).items()})

    of_state = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no forward leaves its plan
        assert compare(mixed, profile_steps=1).tiled
    states = of_state[-1].values()
    assert sorted(state.plan.tiles[0].tokens for state in states) == [BATCH * 32, BATCH * 64]
