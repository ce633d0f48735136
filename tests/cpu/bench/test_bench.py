"""`memopt bench` on a tiny model, end to end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.bench import catalogue, compare, rows
from lightning_memopt.bench.catalogue import Spec
from lightning_memopt.bench.methods import Applied
from lightning_memopt.bench.results import Results
from lightning_memopt.bench.subject import Subject, Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from tests.cpu.lib.engines import needs_native

HERE = "tests.cpu.bench.test_bench"
CPU = torch.device("cpu")


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """What `memopt bench tests.cpu.bench.test_bench:build` calls."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(512, 64)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def not_a_training() -> int:
    return 3


@pytest.fixture
def subject() -> Subject:
    return Subject(lambda: Training.of(build(), "build"), CPU)


def bench(folder: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["bench", f"{HERE}:build", "--out", str(folder), "--rounds", "2", "--budgets", "50%", *more])
    return code, json.loads((folder / "bench.json").read_text())["models"][f"{HERE}:build"]


def test_the_file_names_the_engine_that_the_rows_ran_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process no engine is there until the comparison loads it."""
    engines: list[object] = []
    monkeypatch.setattr(compare, "install_native", lambda say: engines.append(object()))
    monkeypatch.setattr(compare.engine, "loaded", lambda: next(iter(engines), None))
    assert compare.run(compare.Asked(()), {}, tmp_path).data["machine"]["native_engine"]


@needs_native
def test_every_method_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in catalogue.DEFAULT if name not in ("torch-inductor", *catalogue.COMPILE)]  # these need a minute
    code, measured = bench(tmp_path, "--methods", ",".join(names))
    assert code == 0
    assert {row["method"] for row in measured.values()} == set(names)
    states = {label: row["state"] for label, row in measured.items()}
    assert states["transformers"] == states["streamed-offload"] == states["ours-host 50%"] == "refused"
    assert "not one of transformers" in measured["transformers"]["reason"]
    assert all(row["reason"] for row in measured.values() if row["state"] != "measured")
    whole = measured["unmodified"]["peak_nbytes"]
    for label in (
        "per-block",
        "selective",
        "ours 50%",
        "ours-flops 50%",
        "ours-python 50%",
        "ours-lossless 50%",
        "ours-disk 50%",
    ):
        assert states[label] == "measured", measured[label]
        assert measured[label]["exact"] == "equal"
        assert measured[label]["peak_nbytes"] < whole
        assert measured[label]["cpu_ratio"]["median"] > 0
    assert measured["per-block"]["extra_flops"] > 0
    assert measured["ours 50%"]["peak_nbytes"] <= whole // 2
    above = measured["ours at the peak of per-block"]
    assert above["state"] == "measured" and above["peak_nbytes"] <= measured["per-block"]["peak_nbytes"]
    printed = capsys.readouterr()
    assert "checkpointing of each block" in printed.out
    assert len(printed.err.splitlines()) >= len(measured)
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md", "bench.svg", "bench.png"}


@needs_native
def test_the_peak_of_ours_is_the_meters(subject: Subject) -> None:
    """Of the session's own meter, which counts what is resident, too."""
    reference = rows.Reference(subject)
    budget = reference.peak_nbytes // 2
    (spec,) = catalogue.within(["ours"], ["50%"], 10.0, reference.peak_nbytes)
    held = subject.held_nbytes()
    row = rows.measured(spec, subject, reference, rounds=1)
    assert row["state"] == "measured", row
    assert row["peak_nbytes"] <= budget
    assert row["session_peak_nbytes"] - held == pytest.approx(row["peak_nbytes"], abs=4096)
    assert row["predicted_nbytes"] - held == pytest.approx(row["peak_nbytes"], rel=0.01)


@contextlib.contextmanager
def rounding(subject: Subject) -> Iterator[Applied]:
    """Saves activations in half precision: other numbers, on purpose."""

    def unpack(packed: Any) -> torch.Tensor:
        return packed.float()

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t.half() if t.dtype is torch.float32 else t

    yield Applied(lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


@contextlib.contextmanager
def broken(subject: Subject) -> Iterator[Applied]:
    raise ZeroDivisionError("on purpose")
    yield


@needs_native
def test_a_method_that_changes_numbers_differs(subject: Subject) -> None:
    reference = rows.Reference(subject)
    row = rows.measured(Spec("per-block", "", rounding), subject, reference, rounds=1)
    assert row["state"] == "measured" and row["exact"].startswith("differs: gradients by")
    (lossy,) = catalogue.within(["ours-lossy"], ["50%"], 10.0, reference.peak_nbytes)
    assert rows.measured(lossy, subject, reference, rounds=1)["state"] == "measured"
    plain = rows.measured(Spec("per-block", "", catalogue.WHOLE["per-block"]), subject, reference, rounds=1)
    assert plain["exact"] == "equal"  # what ran before has left nothing


def test_a_method_that_fails_has_its_row(subject: Subject) -> None:
    row = rows.measured(Spec("per-block", "", broken), subject, rows.Reference(subject), rounds=1)
    assert (row["state"], row["reason"]) == ("failed", "ZeroDivisionError: on purpose")


def test_a_step_that_does_not_repeat_is_not_called_exact() -> None:
    model, optimizer, _ = build()
    x, turn = torch.randn(512, 64), [0]

    def other() -> torch.Tensor:
        turn[0] += 1
        loss = model(x * turn[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    subject = Subject(lambda: Training(model, optimizer, other), CPU)
    reference = rows.Reference(subject)
    assert not reference.repeats
    row = rows.measured(Spec("per-block", "", catalogue.WHOLE["per-block"]), subject, reference, rounds=1)
    assert row["exact"] == "not known: the unmodified step differs from itself"


def failing() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    model, optimizer, _ = build()

    def step() -> torch.Tensor:
        raise ValueError("no data")

    return model, optimizer, step


def test_a_model_whose_step_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    words = ["bench", f"{HERE}:failing", f"{HERE}:build", "--quick", "--methods", "per-block", "--out", str(tmp_path)]
    assert main(words) == 1
    models = json.loads((tmp_path / "bench.json").read_text())["models"]
    assert models[f"{HERE}:failing"]["unmodified"]["reason"] == "ValueError: no data"
    assert models[f"{HERE}:build"]["per-block"]["state"] == "measured"
    assert "ValueError: no data" in (tmp_path / "bench.md").read_text()


def test_a_second_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, first = bench(tmp_path, "--methods", "per-block,ours", "--limit-seconds", "0")
    assert code == 0 and list(first) == ["unmodified"]  # no row begins after the limit
    code, second = bench(tmp_path, "--methods", "per-block,ours")
    assert code == 0 and set(second) == {"unmodified", "per-block", "ours 50%", "ours at the peak of per-block"}
    assert second["unmodified"] == first["unmodified"]
    monkeypatch.setattr(compare, "measured", broken)  # nothing is measured again
    assert bench(tmp_path, "--methods", "per-block,ours") == (0, second)


def test_a_row_in_which_the_process_died_is_not_begun_again(tmp_path: Path) -> None:
    bench(tmp_path, "--methods", "per-block", "--limit-seconds", "0")
    path = tmp_path / "bench.json"
    data = json.loads(path.read_text())
    results = Results(path, data["asked"], data["machine"])
    died = contextlib.ExitStack()
    died.enter_context(results.running(f"{HERE}:build", "per-block", "per-block", ""))  # never left, as in a crash
    _, measured = bench(tmp_path, "--methods", "per-block")
    assert measured["per-block"]["state"] == "died"


def test_rows_of_another_engine_are_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, "--methods", "per-block", "--limit-seconds", "0")
    other = {**compare.machine("cpu"), "native_engine": "another"}
    monkeypatch.setattr(compare, "machine", lambda device: other)
    assert bench(tmp_path, "--methods", "per-block")[0] == 2
    assert "is of another machine: native_engine was " in capsys.readouterr().err


def test_an_interrupted_row_is_measured_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compare, "measured", interrupted)
        assert bench(tmp_path, "--methods", "per-block")[0] == 130
    assert "run the same command again" in capsys.readouterr().err
    _, measured = bench(tmp_path, "--methods", "per-block")
    assert measured["per-block"]["state"] == "measured"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{HERE}:build", "--budgets", "8GiB"], "is not a share"),
        ([f"{HERE}:build", "--budgets", "140%"], "is not a share"),
        ([f"{HERE}:build", "--methods", "magic"], "there is no magic"),
        ([f"{HERE}:build", "--rounds", "0"], "--rounds is 0"),
        ([f"{HERE}:build", "--quick", "--rounds", "0"], "--rounds is 0"),
        ([f"{HERE}:nothing"], "has no function nothing"),
        ([f"{HERE}:not_a_training"], "make it return"),
        (["gpt17"], "there is no model"),
    ],
)
def test_bad_arguments_give_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, "--out", str(tmp_path / "out")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memopt: ")]
    assert len(lines) == 1 and said in lines[0]


def test_without_matplotlib_there_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lightning_memopt.bench.picture", raising=False)
    monkeypatch.delattr(sys.modules["lightning_memopt.bench"], "picture", raising=False)
    code, measured = bench(tmp_path, "--methods", "per-block")
    assert code == 0 and measured["per-block"]["state"] == "measured"
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md"}
    assert "pip install 'lightning-memopt[bench]'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{HERE}:build", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "--device cuda: torch sees no such device here" in capsys.readouterr().err


def test_results_of_other_arguments_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    Results(path, {"rounds": 2}, {}).write()
    with pytest.raises(ConfigError, match="rounds was 2"):
        Results(path, {"rounds": 3}, {})
    assert Results(path, {"rounds": 3}, {}, again=True).data["models"] == {}
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a file of"):
        Results(path, {"rounds": 3}, {})
    path.write_text("{")
    with pytest.raises(ConfigError):
        Results(path, {"rounds": 3}, {})
