"""`python -m benchmarks gpu` on the CPU: the same code on tiny models; what differs on a GPU, with `torch.cuda` replaced."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import away, codecs, gpu, replay
from benchmarks.gpu.bench import MIB, GpuBench, table
from benchmarks.models.gpu import MODELS, SMOKE
from lightning_memopt.runtime.codecs import NAMES, codec


def test_replay_on_a_tiny_model(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu.main(["replay", "GPT-2", "--smoke", "--no-compile", "--rounds", "1"])
    report = json.loads((tmp_path / "gpu_replay_smoke.json").read_text())
    assert report["smoke"] and list(report["models"]) == ["GPT-2"]
    for name, result in report["models"].items():
        rows = result["rows"]
        assert rows["unmodified"]["equal"] and rows["unmodified"]["time_ratio"] == 1
        ours = [row for label, row in rows.items() if label.startswith("ours") and "equal" in row]
        assert len(ours) >= 2, name
        for row in ours:
            assert row["equal"] and row["within_budget"] and row["replayed_ops"] > 0
            assert row["allocated_mib"] < rows["unmodified"]["allocated_mib"]
            assert row["allocated_mib"] == pytest.approx(row["predicted_allocated_mib"], rel=0.01)
            assert {"time_ratio", "predicted_ratio", "host_us_per_op", "rounds"} <= row.keys()
        assert result["predicted_unmodified_mib"] == pytest.approx(rows["unmodified"]["allocated_mib"], rel=0.01)
    assert report["models"]["GPT-2"]["rows"]["per block"]["equal"]
    last = capsys.readouterr().out.splitlines()
    assert last[-1].startswith("GPT-2") and "us/op" in "".join(last)


def test_offload_and_compress_on_a_tiny_model(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The command that is ready for a GPU: every plan bit-equal and within its budget but the lossy one, and what it moved."""
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu.main(["offload", "compress", "ResNet", "--device", "cpu", "--small", "--rounds", "1"])
    rows = json.loads((tmp_path / "gpu_offload_smoke.json").read_text())["models"]["ResNet"]["rows"]
    assert {"per block", "save_on_cpu", "at per block", "at save_on_cpu", "recompute, at per block", "smallest"} <= rows.keys()
    for row in rows.values():
        assert row["equal"] and row["time_ratio"] > 0 and row.get("within_budget", True)
        if "predicted_allocated_mib" in row:
            assert row["allocated_mib"] == pytest.approx(row["predicted_allocated_mib"], rel=0.01)
    away = rows["all away (Dymem)"]
    assert away["moved_mib"] == pytest.approx(away["predicted_moved_mib"]) and away["forms"].keys() == {"disk"}
    assert 0 <= away["overlap_share"] <= 1 and away["stall_ms"] >= 0 and away["copies_ms"] > 0
    report = json.loads((tmp_path / "gpu_compress_smoke.json").read_text())
    rows = report["models"]["ResNet"]["rows"]
    assert all(row["equal"] and row.get("within_budget", True) for label, row in rows.items() if "lossy" not in label)
    lossy = rows["lossy, all that may"]
    assert lossy["forms"].keys() - {"bools", "positive"} and lossy["codec_ms"] > 0
    assert 0 < lossy["gradient_error"] < 0.05 and lossy["unequal"].startswith("the same loss")
    assert len(report["codecs"]) == 1 + len(NAMES) and all(row["equal"] for row in report["codecs"].values())
    assert "the same loss" in capsys.readouterr().out


def test_batches_on_a_tiny_model(tmp_path: Path, monkeypatch: Any) -> None:
    """What fits unmodified in the bytes of the model's own batch, and with plans: sizes, rates, peaks within these bytes.

    Two trials are enough where the peak grows evenly with the batch. The workspaces of convolutions do not on every processor.
    """
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu.main(["batch", "GPT-2", "--smoke", "--rounds", "1"])
    rows = json.loads((tmp_path / "gpu_batch_smoke.json").read_text())["models"]["GPT-2"]["rows"]
    plain, largest = rows["unmodified, largest"], rows["planned, largest"]
    assert plain["size"] >= 7 and plain["rate_ratio"] == 1 and largest["size_ratio"] > 1
    for row in rows.values():
        assert row["within_budget"] and row["trial_steps"] <= 2 and row["steps"] >= 5
        assert row["samples_per_sec"] > 0 and row["joules_per_sample"] is None, "nobody counts joules on this device"


def test_what_is_measured_is_written_after_each_model(tmp_path: Path, monkeypatch: Any) -> None:
    """A machine that is lent for some minutes may go in the middle; what is not installed leaves its models out."""
    monkeypatch.setenv("OUT", str(tmp_path))
    written: list[list[str]] = []

    def replayed(name: str, *_: Any) -> dict[str, Any]:
        path = tmp_path / "gpu_replay_smoke.json"
        written.append(list(json.loads(path.read_text())["models"]) if path.exists() else [])
        if len(written) == 2:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        if len(written) == 3:
            raise KeyboardInterrupt
        return {"rows": {}}

    monkeypatch.setattr(gpu.replay, "replay", replayed)
    names = list(SMOKE)[:3]
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["replay", *names, "--smoke"])
    assert written == [[], names[:1], names[:2]]
    left = json.loads((tmp_path / "gpu_replay_smoke.json").read_text())["models"]
    assert left == {names[0]: {"rows": {}}, names[1]: {"left_out": "transformers is not installed"}}


def test_codecs_that_break_their_promise_are_found(monkeypatch: Any) -> None:
    class Broken:
        exact, name = False, "broken"

        def error_bound(self, t: torch.Tensor) -> float:
            return 0.25

    x = torch.linspace(-1, 1, 8)
    assert codecs.keeps(Broken(), x, x + 0.2) == (True, pytest.approx(0.8))  # type: ignore[arg-type]
    assert not codecs.keeps(Broken(), x, x + 0.3)[0]  # type: ignore[arg-type]
    assert not codecs.keeps(codec("positive"), x, x + 0.3)[0] and codecs.keeps(codec("positive"), x, 2 * x)[0]
    assert not codecs.keeps(codec("bools"), x > 0, x < 0)[0]


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch: Any) -> None:
    def missing(device: torch.device) -> Any:
        raise ImportError("no such model")

    def full(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried much.")

    cpu = torch.device("cpu")
    assert replay.replay("none", missing, cpu, 60, 1, False)["left_out"] == "no such model"
    assert replay.replay("none", full, cpu, 60, 1, False)["left_out"] == "CUDA out of memory."
    late = replay.replay("GPT-2", SMOKE["GPT-2"], cpu, 0, 1, False)
    assert "observing" in late["left_out"] and "unmodified" in late["rows"]
    assert "left out: observing" in table({"GPT-2": late}, replay.COLUMNS)
    assert "per block" in away.offload("GPT-2", SMOKE["GPT-2"], cpu, 0, 1)["left_out"]
    with pytest.raises(SystemExit, match="unknown Lama"):
        gpu.main(["replay", "Lama", "--smoke"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main(["replay"])
    with pytest.raises(SystemExit, match="add --small"):
        gpu.main(["offload", "--device", "cpu"])
    with pytest.raises(SystemExit, match="unknown no command"):
        gpu.main(["ResNet", "--smoke"])
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
