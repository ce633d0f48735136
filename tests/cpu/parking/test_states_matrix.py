"""Parked optimizer state and gradients in a Trainer: every optimizer with every feature, alone and all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_memopt.runtime import state_copies
from lightning_memopt.session import parked_states as at_rest
from lightning_memopt.session import parked_weights
from tests.cpu.early_updates.test_in_backward_matrix import FEATURES, learn
from tests.cpu.lib.early import OPTIMIZERS
from tests.cpu.lib.engines import HAS_NATIVE
from tests.cpu.lib.fits import assert_same_tree, memopt, session_of

PARKED: dict[str, Any] = dict(offload="disk", max_slowdown=1e6, profile_steps=1)
FACTORED = ("adafactor",)  # its state is smaller than the least that is parked, and its update takes more than gradients


@pytest.mark.parametrize("backward", ["never", pytest.param("always", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exact(name: str, feature: str, backward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, optimizer state, rates, metrics, steps and generator of the plain Trainer, with all state in the disk tier, and
    the gradients of all parameters that are not updated in backward (with the native engine, which parks weights, too).
    """
    monkeypatch.setattr(state_copies, "LEAST_NBYTES", 512)
    for module in (at_rest, parked_weights):
        monkeypatch.setattr(module, "LEAST_NBYTES", 512)
    moved = []
    read = state_copies.StateCopies._read
    monkeypatch.setattr(state_copies.StateCopies, "_read", lambda *args: (moved.append(args[-1]), read(*args))[1])
    options = FEATURES[feature]
    _, plain = learn("auto", name, tmp_path / "saved.ckpt", **options)
    trainer, found = learn(memopt(optimizer_in_backward=backward, **PARKED), name, tmp_path / "saved.ckpt", **options)
    assert_same_tree(plain, found)
    plan = session_of(trainer).plan
    assert plan is not None
    assert any(unit.are_trained for unit in plan.weights) == HAS_NATIVE
    parked = {state.what for state in plan.states}
    if name in FACTORED:
        assert "state" not in parked
    else:
        assert moved and parked == ({"state", "gradient"} if HAS_NATIVE and backward == "never" else {"state"})
