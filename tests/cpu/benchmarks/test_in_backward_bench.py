"""The table of updates in backward: every model takes the batch it is asked for, and a row is measured, predicted and exact."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.models import recurrent
from benchmarks.models.registry import MODELS, built
from benchmarks.papers import in_backward
from benchmarks.papers.in_backward import rows

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("name", MODELS)
def test_batch_is_as_asked(name: str) -> None:
    """The Transformer's target is one word longer than its source: lengths are the builder's matter."""
    model, inputs = built(name, 1)
    assert {len(value) for value in inputs.values()} == {1}
    assert torch.isfinite(model(**inputs).loss)
    assert {len(value) for value in built(name, 3)[1].values()} == {3}


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_row(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured is predicted, lower with updates in backward by a layer's gradients at least, to the bit the unmodified loop."""
    small = partial(recurrent.transformer, layers=1, time=8, width=48)
    monkeypatch.setitem(MODELS, "small", small)
    row = rows("small", 2, "sgd", budget)
    assert row["exact"]
    for mode in ("never", "always"):
        assert "left_plan" not in row[mode]
        assert row[mode]["measured_nbytes"] == pytest.approx(row[mode]["predicted_nbytes"], abs=256)
    layer = small()[0].body.encoder.layers[0]
    gained = row["never"]["measured_nbytes"] - row["always"]["measured_nbytes"]
    assert gained >= sum(p.nbytes for p in layer.parameters())
    assert row["reduction"] == round(100 * gained / row["never"]["measured_nbytes"], 2)


@pytest.mark.parametrize(("bit", "exact"), [(0, True), (1, False)])
def test_one_bit_shows(bit: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a parameter that is not the unmodified loop's says so."""

    def train(name: str, batch: int, optimizer: str, steps: int = 4, **options: Any) -> tuple[list[torch.Tensor], Any, int]:
        peak = {"never": 100, "always": 75}.get(options.get("optimizer_in_backward", ""), 0)
        plan = SimpleNamespace(predicted_peak_nbytes=peak, predicted=SimpleNamespace(rebuilt_ops=0))
        status = SimpleNamespace(measured_peak_nbytes=peak, deviates=True, plan=plan)
        return [torch.tensor([1, bit if peak == 75 else 0])], status, steps

    monkeypatch.setattr(in_backward, "train", train)
    monkeypatch.setattr(in_backward, "held_nbytes", lambda: 0)
    row = rows("any", 1, "sgd", "1GiB")
    assert (row["exact"], row["reduction"]) == (exact, 25.0)
    assert row["always"]["left_plan"]
