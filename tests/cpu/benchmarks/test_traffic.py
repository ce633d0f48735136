"""The table of bytes moved: they are as predicted, and few more than any fixed policy's, if a plan is chosen by bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.models.registry import MODELS
from benchmarks.offload import traffic
from lightning_memopt.bench import zoo
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import install_native

SMALL = {name: partial(build, layers=2, length=16) for name, build in {"small": zoo.gpt2, "adapted": zoo.llama}.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: frozen weights are not parked, and a line says so")
    for small, build in SMALL.items():
        monkeypatch.setitem(MODELS, small, build)
    monkeypatch.setitem(traffic.ADAPTED, "adapted", "adapted")
    monkeypatch.setattr(traffic, "SHARES", {"1/8": 1 / 8})
    (point,) = traffic.row(name)["budgets"].values()
    policy: Any = traffic.best(point)
    for run in point["by"].values():
        assert run["equal"] and run["moved_alike"] and run["moved_nbytes"] == run["predicted_nbytes"] > 0
        assert run["measured_peak_nbytes"] <= point["budget_nbytes"] and run["moved_nbytes"] >= point["bound_nbytes"] > 0
    # all frozen weights and no state would be 8 % less for two layers of Llama: choices are made beside plans that are known
    most = policy[1]["moved_nbytes"] * (1.1 if name == "adapted" else 1.0)
    assert point["by"]["bytes"]["moved_nbytes"] <= most
    assert any("weights" in name for name in point["policies"])
    assert policy[0] in traffic.table({name: {"budgets": {"1/8": point}}})
