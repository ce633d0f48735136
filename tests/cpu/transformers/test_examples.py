"""The examples of transformers' Trainer run, keep their budgets and say so."""

from __future__ import annotations

import importlib

import pytest

from tests.cpu.lib.said import Said

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["transformers_trainer", "peft_lora"])
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: Said) -> None:
    if name == "peft_lora":
        pytest.importorskip("peft")
    monkeypatch.setattr(importlib.import_module("examples.transformers_trainer"), "STEPS", 5)
    importlib.import_module(f"examples.{name}").main()
    printed = capsys.readouterr().out
    assert "loss identical to the plain Trainer's: True" in printed
    table = printed + said.taken()
    assert "measured peak" in table and "(+0.0" in table, "measured as predicted"
