"""`memopt plan`: a model by its factory, and a recorded step again for another budget, without the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memopt.cli import main
from lightning_memopt.plan import read_plan
from lightning_memopt.solvers import planner


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """What `memopt plan tests.cpu.public.test_cli_plan:build` calls."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_plan_of_a_factory_then_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "min.json"), str(tmp_path / "roomy.json")
    assert main(["plan", "tests.cpu.public.test_cli_plan:build", "--budget", "min", "-o", first]) == 0
    smallest, graph = read_plan(first)
    assert smallest.predicted_peak_nbytes < smallest.unmodified_peak_nbytes
    assert main(["plan", first, "--budget", str(smallest.unmodified_peak_nbytes), "-o", second]) == 0
    roomy, _ = read_plan(second)
    assert roomy.fingerprint == smallest.fingerprint
    assert roomy.predicted.extra_seconds <= smallest.predicted.extra_seconds
    assert main(["explain", first]) == 0
    assert "tanh" in capsys.readouterr().out
    assert main(["plan", first, "--budget", "1KiB", "-o", str(tmp_path / "none.json")]) == 3
    assert not (tmp_path / "none.json").exists()
    assert len(graph.saves) > 0


def test_plan_with_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of a session: a smaller peak than recomputation alone, in a directory of one's own; refused as there."""
    alone, ours = str(tmp_path / "alone.json"), str(tmp_path / "ours.json")
    assert main(["plan", "tests.cpu.public.test_cli_plan:build", "--budget", "min", "-o", alone]) == 0
    assert main(["plan", alone, "--budget", "min", "--offload", f"disk:{tmp_path}", "-o", ours]) == 0
    (smallest, _), (plan, _) = read_plan(alone), read_plan(ours)
    assert plan.predicted_peak_nbytes < smallest.predicted_peak_nbytes
    assert {life.form for life in plan.lives if life.how == "fetch"} == {"disk"}
    capsys.readouterr()
    for options, said in (
        (["--offload", f"disk:{tmp_path}/missing"], "cannot make a file in"),
        (["--offload", "tape"], "offload is 'tape'"),
        (["--compress", "zip"], "compress is 'zip'"),
        (["--offload", "host"], "on the CPU, use 'disk'"),
    ):
        assert main(["plan", alone, "--budget", "min", *options]) == 2
        assert said in capsys.readouterr().err


def test_what_explain_names_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The budgets of "what would help most": 10 % more takes the time that it says, the smallest with a disk can be kept."""
    first, more, least = (str(tmp_path / name) for name in ("first.json", "more.json", "least.json"))
    assert main(["plan", "tests.cpu.public.test_cli_plan:build", "--budget", "min", "-o", first]) == 0
    candidates = planner.solve(read_plan(first)[1]).candidates
    next_plan = candidates[len(candidates) // 2]  # it fits when the budget is 10 % more, whatever times were measured
    budget_nbytes = next_plan.predicted.needed_nbytes + planner.UNSEEN_NBYTES - 1
    assert main(["plan", first, "--budget", str(budget_nbytes), "-o", first]) == 0
    assert main(["plan", first, "--budget", str(budget_nbytes * 11 // 10), "-o", more]) == 0
    (now, _), (plan, _) = read_plan(first), read_plan(more)
    assert plan.predicted.extra_seconds < now.predicted.extra_seconds
    capsys.readouterr()
    assert main(["explain", first]) == 0
    text = capsys.readouterr().out
    assert f": {1e3 * plan.predicted.extra_seconds:.2f} instead of" in text
    size = re.search(r"`offload='disk'` lowers the smallest budget by .* to ([\d.]+ \w+)[;.]", text)
    assert size is not None, text
    budget = f"{float(size[1].split()[0]) + 0.01:.2f}{size[1].split()[1]}"  # the page rounds
    assert main(["plan", first, "--budget", budget, "-o", least]) == 3, "not by recomputation alone"
    assert main(["plan", first, "--budget", budget, "--offload", f"disk:{tmp_path}", "-o", least]) == 0
    capsys.readouterr()
    assert main(["explain", least]) == 0
    text = capsys.readouterr().out
    assert "parked: " in text and "on the disk until backward asks for it" in text
    assert "offload='disk'" not in text, "the plan has it"


@pytest.mark.parametrize("source", ["no.such.module:build", f"{__name__}:missing", "neither a file nor a factory"])
def test_a_source_that_is_neither_file_nor_factory_is_refused(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", source, "--budget", "1GiB"]) == 2
    assert source.split(":")[0] in capsys.readouterr().err
