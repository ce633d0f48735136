"""`memopt profile`: this machine as a card. Times are given, so that they are the same on any machine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from lightning_memopt.cli import main
from lightning_memopt.fitting import profiling
from lightning_memopt.fitting.cards import cards_of
from lightning_memopt.plan.rates import OPERATORS, MachineRates

SECONDS = 0.001
"""What each action takes by the clock that tests give."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_LARGEST_SIDE", 256)
    monkeypatch.setattr(profiling, "_MOVED_NBYTES", {True: 1 << 20})


@pytest.fixture
def rates() -> MachineRates:
    ticks = itertools.count()
    return profiling.measured(torch.device("cpu"), "mine", lambda: SECONDS * next(ticks))


def test_rates_are_work_over_seconds(rates: MachineRates) -> None:
    assert rates.device is not None
    assert rates.device.flops_per_second == pytest.approx(dict.fromkeys(profiling.DTYPES, 2 * 256**3 / SECONDS))
    assert rates.device.bytes_per_second == pytest.approx(2 * (1 << 20) / SECONDS)
    assert rates.device.launch_seconds == pytest.approx(SECONDS / 1000)
    assert set(rates.device.efficiency) == set(OPERATORS) - {"matmul"}, "products of matrices are what rates are measured with"
    nbytes = 2 * 2 * 512 * 1024 * 4  # read and written
    ideal = nbytes / rates.device.bytes_per_second
    assert rates.device.efficiency["elementwise"] == pytest.approx(ideal / (SECONDS - SECONDS / 1000))
    assert set(rates.links) == {"disk"} and {"bools", "positive", "int", "block"} == set(rates.codecs)
    assert all("measured by memopt profile" in rates.sources[part] for part in ("links", "codecs", "device"))


def test_the_file_is_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main(["profile", "-o", str(path), "--device", "cpu"]) == 0
    assert "Use it: memopt fit SOURCE --card" in capsys.readouterr().out
    (card,) = cards_of([str(path)])
    assert card.name == "mine" and card.usable_nbytes > 0
    assert all(card.device.op_seconds(1000, 1000, "bfloat16", f"aten::{name}") > 0 for name in ("mm", "convolution", "relu"))


@pytest.mark.parametrize("device", ["cuda", "gpu7"])
def test_a_device_that_is_not_here_is_refused(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["profile", "-o", str(tmp_path / "mine.json"), "--device", device]) == 2
    assert "--device" in capsys.readouterr().err and not list(tmp_path.iterdir())
