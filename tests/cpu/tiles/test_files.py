"""Plan files with loss heads in tiles: what they say is compared where they are used."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.errors import PlanFileError
from lightning_memopt.plan import plan_from_json, plan_to_json, tiles_text
from lightning_memopt.report.explain import explain
from lightning_memopt.runtime.tiles import proof
from lightning_memopt.runtime.tiles.exits import Product
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles import test_loops
from tests.cpu.tiles.language_model import CLASSES, batches, by_step, compare

pytestmark = needs_tiles


def _saving(path):
    """A loop that writes its run's plan to a file."""

    def saving(model, optimizer, log, run):
        test_loops.inside(model, optimizer, log, run)
        if run() is not None:
            run().save_plan(path)

    return saving


def test_a_plan_in_a_file_runs_in_tiles_after_it_has_been_proven_here(tmp_path):
    path = str(tmp_path / "plan.json")

    tiles = compare(_saving(path)).status.plan.tiles
    again = compare(test_loops.inside, plan=path)
    assert again.status.plan.tiles == tiles
    assert f"\nIn tiles: {tiles_text(tiles)}.\n" in explain(*plan_from_json(json.loads((tmp_path / "plan.json").read_text())))


def test_tiles_of_a_file_that_have_other_bits_here_leave_the_head_whole(tmp_path, monkeypatch):
    path = str(tmp_path / "plan.json")
    assert compare(_saving(path)).status.plan.tiles
    monkeypatch.setattr(proof, "equal", lambda a, b: False)
    (why,) = compare(test_loops.inside, plan=path).why_whole
    assert "tiles give other bits than the whole op on this machine" in why


def test_what_the_first_step_did_not_come_to_is_not_taken_from_a_file(tmp_path, monkeypatch):
    """Its backward raises before it comes to the products, whose tiles have other bits here."""
    path = str(tmp_path / "plan.json")
    assert compare(_saving(path)).status.plan.tiles
    into = Product.into

    def wrong(self, out, span):
        into(self, out, span)
        out.view(torch.int32)[0, 0] ^= 1

    def fails(grad):
        raise ValueError

    def failing(model, optimizer, log, run):
        for step, (ids, labels) in enumerate(batches()):
            logits, loss = model(ids, labels)
            if not step:
                logits.register_hook(fails)
            del logits
            with pytest.raises(ValueError) if not step else contextlib.nullcontext():
                loss.backward()
            log.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(Product, "into", wrong)
    compare(failing, plan=path)


def test_a_file_is_compared_again_where_the_first_step_shows_nothing(tmp_path, monkeypatch):
    """The labels of the first step are ignored, so all tiles of gradients are zero there, and have other bits later."""
    path = str(tmp_path / "plan.json")
    assert compare(_saving(path)).status.plan.tiles
    into = Product.into

    def wrong(self, out, span):
        into(self, out, span)
        out.mul_(1.5)

    def loss_of(step, logits, ids, labels):
        labels = labels if step else torch.full_like(labels, -100)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return loss if step else loss.nan_to_num()

    monkeypatch.setattr(Product, "into", wrong)
    (why,) = compare(by_step(loss_of), plan=path).why_whole
    assert "tiles give other bits than the whole op on this machine" in why


def test_a_file_with_wrong_tiles_is_refused(tmp_path):
    path = str(tmp_path / "plan.json")

    compare(_saving(path))
    content = json.loads((tmp_path / "plan.json").read_text())
    plan, graph = plan_from_json(content)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan, graph))))[0] == plan
    content["plan"]["tiles"][0]["rows"] = 0
    with pytest.raises(PlanFileError, match=r"plan.tiles\[0\]"):
        plan_from_json(content)
