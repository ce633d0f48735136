"""`fit_only=True`: `Trainer.train` answers whether the steps fit, and leaves everything as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning_memopt import Fit
from tests.cpu.lib.harness import assert_same_tree
from tests.cpu.lib.loops import installed
from tests.cpu.lib.trainers import assert_same, callback, ends, kept, train, trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_changed(options: dict[str, Any], tmp_path: Path) -> None:
    mine = callback("1GiB", fit_only=True)
    used = trainer([mine], folder=str(tmp_path), save_strategy="steps", save_steps=1, **options)
    before = copy.deepcopy(used.model.state_dict())
    torch_before = installed()
    assert used.train().global_step == 0
    assert installed()[:2] == torch_before[:2]
    assert isinstance(mine.fit, Fit) and mine.fit.cards[0].verdict == "fits" and mine.fit.source == "GPT2LMHeadModel"
    assert_same_tree(before, used.model.state_dict())
    assert not used.optimizer.state and all(p.grad is None for p in used.model.parameters())
    assert not used.state.log_history and not used.is_in_train and list(tmp_path.iterdir()) == []


def test_trained_afterwards() -> None:
    """With the plain Trainer's bits, and the peak that was told."""
    plain = train()
    mine = callback("1GiB", fit_only=True)
    used = trainer([mine])
    used.train()
    answer: Any = mine.fit
    mine.fit_only, mine.config = False, callback("min").config
    used.train()
    assert_same(plain, ends(used))
    kept(mine)
    assert abs(answer.peak_nbytes - (mine.status().unmodified_peak_nbytes or 0)) <= 0.02 * answer.peak_nbytes
