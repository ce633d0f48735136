"""`memopt chain` and the exit codes, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memopt import jsonio
from lightning_memopt.cli import main


def _stage(**changes: object) -> dict[str, object]:
    return {
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "input_nbytes": 100,
        "output_nbytes": 100,
        "saved_nbytes": 300,
        "grad_nbytes": 100,
        "forward_workspace_nbytes": 10,
        "backward_workspace_nbytes": 20,
        **changes,
    }


def _write(tmp_path: Path, stages: list[dict[str, object]]) -> str:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"stages": stages}))
    return str(path)


def test_chain_prints_json_and_writes_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, out = _write(tmp_path, [_stage() for _ in range(6)]), str(tmp_path / "plan.json")
    assert main(["chain", chain, "--budget", "1200", "--bucket", "1B", "-o", out]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "OPTIMAL"
    assert report["peak_nbytes"] <= 1200
    assert report["total_seconds"] > 18.0, "something was run again"
    assert {"bucket_nbytes", "solve_seconds"} <= report.keys()
    written = jsonio.read(out)
    assert [op for op in written["operations"] if op[0] == "B"] == [["B", k] for k in range(5, -1, -1)]


def test_infeasible_names_the_smallest_budget_and_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = _write(tmp_path, [_stage() for _ in range(4)])
    assert main(["chain", chain, "--budget", "300"]) == 3
    message = capsys.readouterr().err
    smallest = message.rsplit("--budget ", 1)[1].rstrip(".\n")
    assert main(["chain", chain, "--budget", smallest]) == 0
    assert main(["chain", chain, "--budget", str(int(smallest) - 1)]) == 3


@pytest.mark.parametrize(
    "stages, what",
    [
        ([_stage(), _stage(input_nbytes=99)], "99"),
        ([_stage(forward_seconds=-1.0)], "forward_seconds"),
        ([], "stage"),
        ([_stage(saved_nbytes=1)], "saved_nbytes"),
    ],
)
def test_bad_chains_exit_with_2_and_name_the_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: list[dict[str, object]], what: str
) -> None:
    assert main(["chain", _write(tmp_path, stages), "--budget", "1000"]) == 2
    assert what in capsys.readouterr().err


def test_missing_file_and_bad_budget_exit_with_2(tmp_path: Path) -> None:
    assert main(["chain", str(tmp_path / "none.json"), "--budget", "1000"]) == 2
    assert main(["chain", _write(tmp_path, [_stage()]), "--budget", "8Gbit"]) == 2
    assert main(["explain", str(tmp_path / "none.json")]) == 2
