"""The benchmarks of `python -m benchmarks gpu` on the CPU: tiny models; what differs on a GPU, with `torch.cuda` replaced."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import away, codecs, lines, measure, replay
from benchmarks.gpu.bench import MIB, GpuBench, run, table
from benchmarks.models.gpu import MODELS, SMOKE
from lightning_memopt.runtime.codecs import NAMES, codec


def measured(path: Path, *words: str) -> dict[str, Any]:
    """The result of a benchmark of a tiny model on the CPU, one round; no row is wrong."""
    measure.main([*words, "--device", "cpu", "--small", "--rounds", "1", "--lines", str(path), "--part", "it"])
    assert not lines.outcomes(path)["it"].named("failed")
    return [line for line in lines.read(path) if line["kind"] == "numbers"][-1]["result"]


def test_replay_on_a_tiny_model(tmp_path: Path, capsys: Any) -> None:
    result = measured(tmp_path / "lines", "replay", "GPT-2")
    rows = result["rows"]
    assert rows["unmodified"]["equal"] and rows["unmodified"]["time_ratio"] == 1
    ours = [row for label, row in rows.items() if label.startswith("ours") and "equal" in row]
    assert len(ours) >= 2
    for row in ours:
        assert row["equal"] and row["within_budget"] and row["replayed_ops"] > 0
        assert row["allocated_mib"] < rows["unmodified"]["allocated_mib"]
        assert row["allocated_mib"] == pytest.approx(row["predicted_allocated_mib"], rel=0.01)
        assert {"time_ratio", "predicted_ratio", "host_us_per_op", "rounds"} <= row.keys()
    assert result["predicted_unmodified_mib"] == pytest.approx(rows["unmodified"]["allocated_mib"], rel=0.01)
    assert rows["per block"]["equal"]
    last = capsys.readouterr().out.splitlines()
    assert last[-1].startswith("GPT-2") and "us/op" in "".join(last)


def test_offload_and_compress_on_a_tiny_model(tmp_path: Path, capsys: Any) -> None:
    """What is ready for a GPU: every plan bit-equal and within its budget but the lossy one, and what it moved."""
    rows = measured(tmp_path / "offload", "offload", "ResNet")["rows"]
    assert {"per block", "save_on_cpu", "at per block", "at save_on_cpu", "recompute, at per block", "smallest"} <= rows.keys()
    for row in rows.values():
        assert row["equal"] and row["time_ratio"] > 0 and row.get("within_budget", True)
        if "predicted_allocated_mib" in row:
            assert row["allocated_mib"] == pytest.approx(row["predicted_allocated_mib"], rel=0.01)
    away = rows["all away (Dymem)"]
    assert away["moved_mib"] == pytest.approx(away["predicted_moved_mib"]) and away["forms"].keys() == {"disk"}
    assert 0 <= away["overlap_share"] <= 1 and away["stall_ms"] >= 0 and away["copies_ms"] > 0
    rows = measured(tmp_path / "compress", "compress", "ResNet")["rows"]
    assert all(row["equal"] and row.get("within_budget", True) for label, row in rows.items() if "lossy" not in label)
    lossy = rows["lossy, all that may"]
    assert lossy["forms"].keys() - {"bools", "positive"} and lossy["codec_ms"] > 0
    assert 0 < lossy["gradient_error"] < 0.05 and lossy["unequal"].startswith("the same loss")
    assert "the same loss" in capsys.readouterr().out
    rows = measured(tmp_path / "codecs", "codecs")["rows"]
    assert len(rows) == 1 + len(NAMES) and all(row["equal"] for row in rows.values())


def test_batches_on_a_tiny_model(tmp_path: Path) -> None:
    """What fits unmodified in the bytes of the model's own batch, and with plans: sizes, rates, peaks within these bytes.

    Two trials are enough where the peak grows evenly with the batch. The workspaces of convolutions do not on every processor.
    """
    rows = measured(tmp_path / "lines", "batch", "GPT-2")["rows"]
    plain, largest = rows["unmodified, largest"], rows["planned, largest"]
    assert plain["size"] >= 7 and plain["rate_ratio"] == 1 and largest["size_ratio"] > 1
    for row in rows.values():
        assert row["within_budget"] and row["trial_steps"] <= 2 and row["steps"] >= 5
        assert row["samples_per_sec"] > 0 and row["joules_per_sample"] is None, "nobody counts joules on this device"


def test_rows_are_written_as_they_are_made(tmp_path: Path, monkeypatch: Any) -> None:
    """The process may be stopped in the middle."""

    def stopped(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
        result["rows"]["unmodified"] = row = {"equal": True}
        row["allocated_mib"] = 3.0
        result["rows"]["smallest"] = {}
        raise KeyboardInterrupt

    monkeypatch.setitem(measure.BODIES, "replay", (stopped, replay.COLUMNS))
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "lines", "replay", "GPT-2")
    (line,) = lines.read(tmp_path / "lines")
    assert line["result"] == {"rows": {"unmodified": {"equal": True, "allocated_mib": 3.0}}} and line["small"]


def test_what_is_wrong_is_told_from_what_is_right(tmp_path: Path, monkeypatch: Any) -> None:
    def body(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
        result["rows"] |= {
            "ours": {"equal": False, "within_budget": False, "budget_mib": 4.0, "allocated_mib": 5.5},
            "lossy, smallest": {"equal": False},
            "per block": {"equal": False},
        }
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setitem(measure.BODIES, "replay", (body, replay.COLUMNS))
    with pytest.raises(AssertionError):
        measured(tmp_path / "lines", "replay", "GPT-2")
    tests = lines.outcomes(tmp_path / "lines")["it"].tests
    assert {name: (line["outcome"], line["message"]) for name, line in tests.items()} == {
        "GPT-2: ours": ("failed", "other bits and above the budget by 1.50 MiB"),
        "GPT-2: lossy, smallest": ("passed", ""),
        "GPT-2: per block": ("passed", ""),
        "GPT-2: the rest": ("skipped", "transformers is not installed"),
    }


def test_codecs_that_break_their_promise_are_found(monkeypatch: Any) -> None:
    class Broken:
        exact = False

    monkeypatch.setattr(codecs, "error_bound", lambda c, t: 0.25)
    x = torch.linspace(-1, 1, 8)
    assert codecs.keeps(Broken(), x, x + 0.2) == (True, pytest.approx(0.8))  # type: ignore[arg-type]
    assert not codecs.keeps(Broken(), x, x + 0.3)[0]  # type: ignore[arg-type]
    assert not codecs.keeps(codec("positive"), x, x + 0.3)[0] and codecs.keeps(codec("positive"), x, 2 * x)[0]
    assert not codecs.keeps(codec("bools"), x > 0, x < 0)[0]


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    def missing(device: torch.device) -> Any:
        raise ImportError("no such model")

    def full(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried much.")

    cpu = torch.device("cpu")
    assert run("none", missing, cpu, 60, 1, replay.replay)["left_out"] == "no such model"
    assert run("none", full, cpu, 60, 1, replay.replay)["left_out"] == "CUDA out of memory."
    late = run("GPT-2", SMOKE["GPT-2"], cpu, 0, 1, replay.replay)
    assert "observing" in late["left_out"] and "unmodified" in late["rows"]
    assert "left out: observing" in table({"GPT-2": late}, replay.COLUMNS)
    assert "per block" in run("GPT-2", SMOKE["GPT-2"], cpu, 0, 1, away.offload)["left_out"]
    assert len(MODELS) == 5


def test_peaks_and_times_on_a_gpu(monkeypatch: Any) -> None:
    """From an empty cache and reset peaks, in the second of two equal steps; times are between events, in milliseconds."""
    calls: list[str] = []
    answers = {"max_memory_allocated": 3 * MIB, "max_memory_reserved": 5 * MIB, "get_rng_state": torch.zeros(16)}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: calls.append(name) or answers.get(name))
    event = types.SimpleNamespace(record=lambda: calls.append("record"), elapsed_time=lambda other: 250.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(GpuBench, "on_gpu", True)
    bench = GpuBench("GPT-2", SMOKE["GPT-2"], torch.device("cpu"))
    monkeypatch.setattr(bench, "step", lambda forward=None: (calls.append("step"), (forward or bench.forward)())[1])
    assert bench.peaks() == {"allocated_mib": 3, "reserved_mib": 5}
    assert calls[1:6] == ["empty_cache", "reset_peak_memory_stats", "step", "step", "synchronize"]
    calls.clear()
    seconds, host = bench.seconds(None)
    assert seconds == 0.25 and 0 < host < 60
    assert calls == ["synchronize", "record", "step", "record", "synchronize"]
    assert bench.outcome()[1] is answers["get_rng_state"]
    assert codecs.seconds(lambda: calls.append("codec"), torch.device("cuda")) == 0.25
