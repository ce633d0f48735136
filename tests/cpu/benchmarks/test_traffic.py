"""The table of bytes moved: they are as predicted, and few more than any fixed policy's, if a plan is chosen by bytes."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.models.registry import MODELS
from benchmarks.offload import traffic
from lightning_memopt.bench import zoo
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import install_native


class Recurrent(nn.Module):
    """Three LSTMs of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(64, 64) for _ in range(3))
        self.output = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> SimpleNamespace:
        for layer in self.layers:
            x = layer(x)[0]
        return SimpleNamespace(loss=self.output(x).square().mean())


def recurrent(batch: int) -> tuple[nn.Module, dict[str, Tensor], None]:
    torch.manual_seed(0)
    return Recurrent(), {"x": torch.randn(4, batch, 64)}, None


SMALL = {
    "small": (partial(zoo.gpt2, layers=2, length=16), "1/8"),
    "adapted": (partial(zoo.llama, layers=2, length=16), "1/8"),
    "recurrent": (recurrent, "2/3"),  # with weights parked, a step moved three times as much
}
"""Models, and the budgets for them."""


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: frozen weights are not parked, and a line says so")
    for small, (build, _) in SMALL.items():
        monkeypatch.setitem(MODELS, small, build)
    monkeypatch.setitem(traffic.ADAPTED, "adapted", "adapted")
    label = SMALL[name][1]
    monkeypatch.setattr(traffic, "SHARES", {label: float(Fraction(label))})
    (point,) = traffic.row(name)["budgets"].values()
    policy: Any = traffic.best(point)
    for run in point["by"].values():
        assert run["equal"] and run["moved_alike"] and run["moved_nbytes"] == run["predicted_nbytes"] > 0
        assert run["measured_peak_nbytes"] <= point["budget_nbytes"] and run["moved_nbytes"] >= point["bound_nbytes"] > 0
    # all frozen weights and no state would be 8 % less for two layers of Llama: choices are made beside plans that are known
    most = policy[1]["moved_nbytes"] * (1.1 if name == "adapted" else 1.0)
    assert point["by"]["bytes"]["moved_nbytes"] <= most
    assert any("weights" in name for name in point["policies"])
    assert policy[0] in traffic.table({name: {"budgets": {label: point}}})
