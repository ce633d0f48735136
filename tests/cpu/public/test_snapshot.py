"""A planned step as a memory snapshot, read by torch's own viewer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from lightning_memopt import optimize
from lightning_memopt.errors import ConfigError
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.fits import fit, memopt
from tests.cpu.lib.trainers import callback, trainer


def planned(path: Path, **options: Any) -> tuple[Run, dict[str, Any]]:
    """A run that is over, and the snapshot of its planned step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.Adam(model.parameters())
    with optimize(model, optimizer, budget="min", profile_steps=2, verbose=False, **options) as run:
        for _ in range(4):
            model(torch.randn(512, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.dump_snapshot(str(path))
    return run, pickle.loads(path.read_bytes())


def live(snapshot: dict[str, Any]) -> list[int]:
    """Bytes in memory after each event: those at the end, less what came, plus what went."""
    (trace,) = snapshot["device_traces"]
    changes = [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] != "free_requested"]
    held = sum(segment["allocated_size"] for segment in snapshot["segments"]) - sum(changes)
    levels = [held]
    for change in changes:
        levels.append(levels[-1] + change)
    return levels


@pytest.mark.parametrize("options", [{}, {"offload": "disk", "compress": "lossless"}])
def test_its_events_add_up_to_the_predicted_peak(tmp_path: Path, options: dict[str, str]) -> None:
    run, snapshot = planned(tmp_path / "step.pickle", **options)
    assert run.plan is not None
    assert max(live(snapshot)) == run.plan.predicted.peak_nbytes
    if not options:
        assert any("rebuilt or" in e["frames"][0]["filename"] for e in snapshot["device_traces"][0])


def test_no_two_blocks_overlap_and_times_rise(tmp_path: Path) -> None:
    _, snapshot = planned(tmp_path / "step.pickle")
    (trace,) = snapshot["device_traces"]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times) and times[-1] > times[0]
    blocks: dict[int, int] = {}
    for event in trace:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(other_end <= begin or end <= other for other, other_end in blocks.items())
            blocks[begin] = end
        elif event["action"] == "free_completed":
            blocks.pop(begin, None)


def test_the_viewer_of_torch_reads_it(tmp_path: Path) -> None:
    _, snapshot = planned(tmp_path / "step.pickle")
    assert "total_allocated" in _memory_viz.segsum(snapshot)
    assert "del " in _memory_viz.trace(snapshot)
    assert "GELU" not in (text := _memory_viz.memory(snapshot, format_flamegraph=str)) and "weight" in text
    page = _memory_viz.trace_plot(snapshot)
    assert "Active Memory Timeline" in page
    assert "MemoryViz" in _memory_viz.segment_plot(snapshot)


def test_without_a_plan_it_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with optimize(model, torch.optim.SGD(model.parameters(), 0.1), budget="1GiB", verbose=False) as run:
        with pytest.raises(ConfigError, match="no plan yet"):
            run.dump_snapshot(str(tmp_path / "step.pickle"))
    assert not (tmp_path / "step.pickle").exists()


def test_lightning_and_transformers_write_it_too(tmp_path: Path) -> None:
    strategy = memopt()
    with pytest.raises(ConfigError, match="no plan yet"):
        strategy.dump_snapshot(str(tmp_path / "none.pickle"))
    fit(strategy, max_epochs=1)
    strategy.dump_snapshot(str(tmp_path / "fit.pickle"))
    with pytest.raises(ConfigError, match="no plan yet"):
        (watching := callback()).dump_snapshot(str(tmp_path / "none.pickle"))
    trainer(callbacks=[watching]).train()
    watching.dump_snapshot(str(tmp_path / "train.pickle"))
    for name in ("fit", "train"):
        snapshot = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        assert "total_allocated" in _memory_viz.segsum(snapshot) and snapshot["device_traces"][0]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        planned(tmp_path / "nowhere" / "step.pickle")
