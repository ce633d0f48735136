"""Memory that others take, slices of devices, and drivers that do not answer. All of it is of CUDA: the runtime is faked."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_memopt
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.backends import backend_of
from lightning_memopt.session import budget as budgets
from lightning_memopt.session.budget import Neighbours, budget_on

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


class Card:
    """What the CUDA runtime says of a device: `others` bytes are taken by other programs, `ours` by this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.others, self.ours, self.asked = total, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=self.total))
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.ours)

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        self.asked += 1
        return self.total - self.others - self.ours, self.total


def test_k8_memory_taken_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes memory that the budget counts on: one warning with both amounts, the device and what to do."""
    card = Card(monkeypatch, 16 * GIB)
    config = MemOptConfig(budget="12GiB", verbose=False)
    budget = budget_on(CUDA, config)
    assert budget == 12 * GIB
    neighbours = Neighbours(CUDA, budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        card.ours = 11 * GIB  # what this process takes is its own
        for _ in range(3 * budgets.EVERY):
            neighbours.step_ended(planned=True)
    card.others = 6 * GIB
    with pytest.warns(UserWarning) as warned:
        for _ in range(5 * budgets.EVERY):
            neighbours.step_ended(planned=True)
    assert len(warned) == 1
    text = str(warned[0].message)
    assert str(10 * GIB) in text and str(12 * GIB) in text and "cuda:0" in text and "other programs" in text
    assert "Lower the budget" in text
    card.others = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * budgets.EVERY):
            neighbours.step_ended(planned=True)
    card.others = 5 * GIB
    with pytest.warns(UserWarning, match="other programs"):  # it is said again when it happens again
        for _ in range(2 * budgets.EVERY):
            neighbours.step_ended(planned=True)


def test_k8_costs_nothing_on_the_cpu_and_little_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime is asked every few steps only, and not at all where there is nothing to ask or no budget."""
    card = Card(monkeypatch, 16 * GIB)
    for device, budget in ((torch.device("cpu"), GIB), (CUDA, None)):
        neighbours = Neighbours(device, budget)
        for _ in range(100):
            neighbours.step_ended(planned=True)
    assert card.asked == 0
    neighbours = Neighbours(CUDA, GIB)
    for _ in range(4 * budgets.EVERY):
        neighbours.step_ended(planned=True)
    assert card.asked == 4


def test_k9_a_slice_is_what_the_runtime_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a MIG slice of 16 GiB shares are of the slice, whatever the board has, and more is refused with the slice's bytes."""
    Card(monkeypatch, 16 * GIB)
    assert backend_of(CUDA).total_nbytes() == 16 * GIB and backend_of(CUDA).free_nbytes() == 16 * GIB
    assert budget_on(CUDA, MemOptConfig(budget="50%")) == 8 * GIB
    with pytest.raises(lightning_memopt.MemOptError, match=str(16 * GIB)):
        budget_on(CUDA, MemOptConfig(budget="100GiB"))


def test_k9_k10_p31_nothing_asks_the_driver() -> None:
    """Nothing that plans or runs asks NVML or nvidia-smi: where they are missing or see another device, nothing is lost.

    What measures energy does, where that is wanted: see test_energy.py.
    """
    package = Path(lightning_memopt.__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name in ("telemetry", "callbacks") or path == package / "batching" / "energy.py":
            continue
        if path in (package / "native" / "build.py", package / "cxx.py"):
            continue  # they ask a compiler
        source = path.read_text(encoding="utf-8")
        text = source.lower()
        assert "pynvml" not in text and "nvidia-smi" not in text and "nvml_source" not in text, path
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("pynvml", "nvidia", "subprocess") for name in names), path
