"""Spans of planned steps in the trace of torch's profiler; none where no profiler runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_memopt import optimize
from lightning_memopt.native import engine
from lightning_memopt.runtime import spans
from tests.cpu.lib.engines import needs_native


def traced(path: Path, **options: Any) -> list[str]:
    """Names of our spans in the Chrome trace of one planned step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(512, 64)
    with optimize(model, optimizer, budget="min", profile_steps=2, verbose=False, **options) as run:
        for turn in range(6):
            with profile(activities=[ProfilerActivity.CPU]) if turn == 5 else torch.enable_grad() as profiler:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.plan is not None and run.plan.lives
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if str(event.get("name", "")).startswith("MemOpt: ")]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_rebuilds_are_in_the_trace(tmp_path: Path, native: bool) -> None:
    if native:
        names = traced(tmp_path / "trace.json")
    else:
        with engine.without():
            names = traced(tmp_path / "trace.json")
    assert names and any("rebuild" in name and "op" in name for name in names), names


def test_copies_are_in_the_trace(tmp_path: Path) -> None:
    names = traced(tmp_path / "trace.json", offload="disk", recompute=False)
    kinds = {name.split()[1] for name in names}
    assert {"park", "fetch", "wait"} <= kinds, names


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(spans, "record_function", refused)
    assert spans.transfer("fetch", 1) is spans.transfer("park", 2)
