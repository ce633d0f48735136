"""Several ranks ask for a report at one path (tests/cpu/lib/report_ranks.py): who writes, and that no file is of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.ranks import rank_and_ranks
from lightning_memopt.report.record import read_record
from lightning_memopt.report.run import RunReport
from tests.cpu.lib.pages import page_at
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.written import needs_gloo, written

pytestmark = [needs_gloo, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> Path:
    path = tmp_path_factory.mktemp("reports")
    written("report_ranks", path, timeout=300, by=package_interpreter)
    return path


def peak(folder: Path, case: str, rank: int) -> Any:
    from lightning_memopt import jsonio

    return jsonio.read(folder / f"{rank}.json")[case]


def files(folder: Path, case: str) -> list[str]:
    return sorted(path.name for path in (folder / case).iterdir())


def test_rank_0_writes_for_all_that_train_a_model_together(folder: Path) -> None:
    assert files(folder, "together") == ["run.html", "run.json"]
    record = read_record(folder / "together" / "run.json")
    assert (record.rank, record.ranks) == (0, 2)
    assert record.measured_peak_nbytes == peak(folder, "together", 0) != peak(folder, "together", 1)
    assert "rank 0 of 2" in page_at(folder / "together" / "run.html").text


def test_models_without_a_wrapper_have_the_report_of_rank_0(folder: Path) -> None:
    assert files(folder, "apart") == ["run.html", "run.json"]
    assert read_record(folder / "apart" / "run.json").measured_peak_nbytes == peak(folder, "apart", 0)


def test_each_group_has_a_report(folder: Path) -> None:
    assert files(folder, "groups") == ["run-rank1.html", "run-rank1.json", "run.html", "run.json"]
    for rank, name in enumerate(("run", "run-rank1")):
        record = read_record(folder / "groups" / f"{name}.json")
        assert (record.rank, record.ranks) == (rank, 1)
        assert record.measured_peak_nbytes == peak(folder, "groups", rank)


def test_the_report_of_rank_0_names_the_rank_that_failed(folder: Path) -> None:
    assert files(folder, "fails") == ["run.html", "run.json"]
    error = read_record(folder / "fails" / "run.json").error
    assert "ank 1" in error and "Broke: in the last step" in error, error


@pytest.mark.parametrize(("rank", "path"), [("0", "run.html"), ("1", None), ("", "run.html")])
def test_before_there_is_a_process_group_the_launcher_says_who_writes(
    rank: str, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = RunReport(MemOptConfig(report=tmp_path / "run.html"), nn.Linear(1, 1))
    assert report.path == (path and tmp_path / path)
    assert rank_and_ranks(nn.Linear(1, 1)) == (int(rank or 0), [0, 1])
