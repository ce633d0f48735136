"""`python -m benchmarks loops`: a few of its loops through the command, and a judge that finds what it is there to find."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lib.digests import digest
from benchmarks.robustness import loops, loops_count
from benchmarks.robustness.loops_judge import RESTS, examine, judge
from benchmarks.robustness.scripts import LOOPS

ROOT = Path(loops.__file__).parents[2]
counts = pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")
QUICK = ("lora", "dqn")
STATE = dict.fromkeys(RESTS, 0)
"""Of a step in which nothing that rests could be parked."""


def _output(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=loops_count.environment(), capture_output=True, text=True, check=True, timeout=300
    ).stdout


@pytest.mark.long
@counts
def test_a_few_loops_through_the_command(tmp_path: Path) -> None:
    """Exact and never silent; the page has a row for each, and keeps what the file has of others."""
    results, table = tmp_path / "loops.json", tmp_path / "loops.md"
    results.write_text(json.dumps({"loops": {"vae": {"status": "from before", "runs": {}}}}))
    _output("-m", "benchmarks", "loops", *QUICK, "--jobs", "1", "--json", str(results), "--table", str(table))
    rows = json.loads(results.read_text())["loops"]
    assert sorted(rows) == sorted([*QUICK, "vae"])
    for name in QUICK:
        for run in rows[name]["runs"].values():
            assert run["exact"] and run["planned_steps"] >= 10 and run["solves"] >= 1, (name, run)
            assert "silent" not in run["faults"] and "crashed" not in run["faults"], (name, run)
    assert rows["lora"]["runs"]["min"]["dropped"] > 0, "a plan that rebuilds was in force"
    page = table.read_text()
    assert all(f"| {name} |" in page for name in (*QUICK, "vae")) and "from before" in page


@counts
def test_the_count_of_the_allocator() -> None:
    """Each byte that a tensor asks for, and the most there was meanwhile."""
    program = (
        "import torch; from benchmarks.robustness.loops_count import live_nbytes, true_peak;"
        "before = live_nbytes(); true_peak();"
        "x = torch.empty(1000); y = torch.empty(500, dtype=torch.uint8); after = live_nbytes(); del x;"
        "print(after - before, live_nbytes() - before, true_peak() - before, true_peak() - before)"
    )
    assert _output("-c", program).split() == ["4500", "500", "4500", "500"]


@pytest.mark.long
@counts
def test_faults_are_found_in_real_runs() -> None:
    """A bit flipped, a number drawn, memory taken, a process that dies: each is found, and nothing else."""
    rows: dict[str, Any] = {}
    for line in _output("-m", "tests.cpu.lib.faulty_loops").splitlines():
        rows |= json.loads(line)
    assert rows["wrong"]["different"] == ["state.model.0.bias"] and "not exact" in rows["wrong"]["faults"]
    assert rows["draws"]["different"] == ["generators.torch"] and "not exact" in rows["draws"]["faults"]
    hungry = rows["hungry"]
    assert hungry["exact"] and "budget broken" in hungry["faults"] and hungry["over"] > 1 << 21
    assert rows["aborts"]["faults"][-1] == "crashed" and "-6" in rows["aborts"]["error"]


def _outcome(**changes: Any) -> dict[str, Any]:
    step = {"began": 100, "peak": 300, "predicted": 290, "promised": 290, "between": 190, "dropped": 50}
    step |= STATE
    outcome = {
        "status": "trained", "losses": [["0x1p0"], ["0x1p1"]], "steps": [step, dict(step)], "said": [], "output": [],
        "state": {"model": {"weight": "a", "bias": "b"}}, "generators": {"torch": "c", "numpy": "d"}, "solves": 1,
        "solve_seconds": 0.1, "seconds": 1.0, "measured_by_session": 300, "reports": [],
    }  # fmt: skip
    return copy.deepcopy(outcome | changes)


def test_the_judge() -> None:
    """Plain data: what is wrong with a run is named, and a run without a fault has none."""
    plain = _outcome()
    assert judge(plain, _outcome(), [300])["faults"] == []
    assert judge(plain, _outcome(), [299])["faults"] == ["budget broken"]
    assert judge(plain, _outcome(), ["min"])["faults"] == [], "nothing but a prediction, of which it is not far off"
    assert judge(plain, _outcome(), [250, 290, 300])["faults"] == ["refused 2 times"]
    assert judge(plain, _outcome(), [250, 300])["faults"] == []
    assert judge(plain, _outcome(losses=[["0x1p0"], ["0x1p2"]]), [300])["different"] == ["loss of step 1"]
    assert judge(plain, _outcome(losses=[["0x1p0"]]), [300])["different"] == ["1 steps instead of 2"]
    other = {"model": {"weight": "a", "bias": "x"}}
    assert judge(plain, _outcome(state=other), [300])["faults"] == ["not exact"]
    assert judge(plain, _outcome(state={"model": {"weight": "a"}}), [300])["different"] == ["state.model"]
    assert judge(plain, _outcome(generators={"torch": "x", "numpy": "d"}), [300])["different"] == ["generators.torch"]
    crash = _outcome(status="crashed", error="E", traceback="T")
    assert judge(plain, crash, [300])["faults"] == ["crashed"]
    assert judge(plain, _outcome(status="refused", error="E"), [300])["faults"] == ["refused at last"]


def test_the_judge_of_optimizer_state() -> None:
    """What could be parked is away when the step is over, or a line says why not. The plan of "min" may leave a little."""
    plain, step = _outcome(), _outcome()["steps"][0]
    away = step | {"parked": 60_000, "parkable": 60_000, "away": 60_000}
    for nbytes in (60_000, 59_000):
        assert judge(plain, _outcome(steps=[step, away | {"away": nbytes}]), ["min"])["faults"] == []
    here = [step, away | {"away": 20_000}]
    assert judge(plain, _outcome(steps=here), ["min"])["faults"] == ["state not parked, silent"]
    assert judge(plain, _outcome(steps=here, said=["MemOpt: optimizer state is not parked: LBFGS"]), ["min"])["faults"] == []
    said = ["MemOpt: parked between updates: the optimizer state of 1 parameter"]
    assert judge(plain, _outcome(steps=here, said=said), ["min"])["faults"] == ["state not parked, silent"]


@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_the_judge_of_gradients_and_weights(what: str) -> None:
    """By the smallest plan, each plan was offered all of them. What it parks is away. Or a line says why not."""
    plain, step = _outcome(), _outcome()["steps"][0]
    silent = [f"{what} not parked, silent"]

    def faults(budget: Any, said: str = "", **nbytes: int) -> list[str]:
        last = step | {f"{what}_{how}": n for how, n in nbytes.items()}
        found = judge(plain, _outcome(steps=[step, last], said=[said]), [budget])["faults"]
        return [fault for fault in found if "parked" in fault]

    assert faults("min", parked=60, away=60) == faults(300, unknown=60) == []
    assert faults("min", unknown=60) == faults("min", parked=60, missing=20) == faults(300, parked=60, missing=20) == silent
    assert faults("min", f"MemOpt: {what} stay on the device (60 bytes): they are sparse.", unknown=60) == []
    assert faults("min", "MemOpt: optimizer state is not parked: LBFGS", unknown=60) == silent


def test_the_judge_of_what_comes_between_steps() -> None:
    """More than the budget is not a fault of the plan, but a line must say it."""
    test = _outcome()["steps"][0] | {"between": 900}
    said = "MemOpt: 900 bytes (900 B) were in memory between an update and the next forward, 600 above the budget."
    steps = [_outcome()["steps"][0], test]
    plain = _outcome()
    assert judge(plain, _outcome(steps=steps), [300])["faults"] == ["more between steps, silent"]
    assert judge(plain, _outcome(steps=steps, said=[said]), [300])["faults"] == []
    assert judge(plain, _outcome(steps=[*steps[:1], test | {"predicted": None}]), [300])["faults"] == [], "it had no plan"


def test_the_judge_of_steps_that_change() -> None:
    """A larger step that is said, and after which the budget is kept, is not a fault; an unnoticed one is, and the last one."""
    step = _outcome()["steps"][0]
    large = step | {"peak": 400}
    said = ["MemOpt: a planned step was measured at 400 bytes (400 B), 100 above the budget; observing again (1 of 3)"]
    plain = _outcome(losses=[["0x1p0"]] * 3)

    def faults(steps: list[dict[str, Any]], said: list[str]) -> list[str]:
        return judge(plain, _outcome(losses=plain["losses"], steps=steps, said=said), [300])["faults"]

    assert faults([step, large, step], said) == []
    assert faults([step, large, step], []) == ["budget broken"]
    assert faults([large, large, step], said) == ["budget broken"], "one of the two was not noticed"
    assert faults([step, step, large], said) == ["budget broken"], "nothing was done about it"
    why = ["MemOpt: the budget is not kept: no plan of this step fits 300 bytes. The smallest one is in force."]
    assert faults([step, large, large], why) == [], "a line says why, and what to do"

    rest = {"began": 100, "between": 190, "dropped": 50} | STATE

    def smallest(steps: list[dict[str, Any]]) -> list[str]:
        return judge(plain, _outcome(losses=plain["losses"], steps=steps), ["min"])["faults"]

    a_step, large, right = ({"peak": a << 20, "predicted": b, "promised": b << 20} | rest for a, b in ((1, 1), (2, 1), (2, 2)))
    assert smallest([a_step, large, right]) == [], "what is predicted follows"
    assert smallest([a_step, right, large]) == ["budget broken"]


def test_the_judge_of_observed_steps() -> None:
    """The same step of the plain run is the measure, or the budget where that is larger."""
    step = {"peak": 1 << 20, "predicted": None, "began": 100, "between": 0, "dropped": 0}
    plain = _outcome(steps=[step, step | {"peak": 3 << 20}])

    def faults(peaks: list[float], budget: int | str) -> list[str]:
        steps = [step | {"peak": int(peak * (1 << 20))} for peak in peaks]
        return judge(plain, _outcome(steps=steps, said=["MemOpt: no plan"]), [budget])["faults"]

    assert faults([1.1, 3.3], "min") == []
    assert faults([1.2, 3.0], "min") == ["observed step too large"]
    assert faults([1.2, 3.0], 2 << 20) == []
    assert faults([2.1, 3.0], 2 << 20) == ["observed step too large"]


def test_the_judge_of_silence() -> None:
    """Without a plan a line must say why; what only tells of progress does not."""
    steps = [{"began": 100, "peak": 300, "predicted": None, "between": 0, "dropped": 0}] * 2
    progress = ["MemOpt: observing 3 steps on cpu", "MemOpt:   minimum cuts: 4 plans"]
    assert judge(_outcome(), _outcome(steps=steps, said=progress), [300])["faults"] == ["silent"]
    row = judge(_outcome(), _outcome(steps=steps, said=[*progress, "MemOpt: no plan: nothing is saved."]), [300])
    assert row["faults"] == [] and row["planned_steps"] == 0
    assert "none: no plan: nothing is saved." in loops.line_of("x", {"runs": dict.fromkeys(("100 %", "half", "min"), row)})


def test_a_refused_budget_is_tried_again_with_the_number_that_was_named() -> None:
    asked: list[Any] = []

    def run(budget: Any) -> dict[str, Any]:
        asked.append(budget)
        refused = isinstance(budget, int) and budget < 260
        return _outcome(status="refused", smallest=budget + 40, error="E") if refused else _outcome()

    row = examine(run)
    assert asked == [None, 300, 200, 240, 280, "min"], "half is what is resident and half of the rest"
    assert row["status"] == "faulty" and row["runs"]["100 %"]["faults"] == []
    assert row["runs"]["half"]["faults"] == ["refused 2 times", "budget broken"]
    assert examine(lambda budget: _outcome(status="crashed", error="E"))["status"] == "does not train plainly"


def test_digests_differ_where_a_bit_does() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("quiet", torch.zeros(2), persistent=False)
    before = digest(model)
    with torch.no_grad():
        model.quiet.mul_(-1.0)
    assert digest(model) != before and torch.equal(model.quiet, torch.zeros(2)), "-0.0 is not 0.0"
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2)).sum().backward()
    empty = digest(optimizer)
    optimizer.step()
    assert digest(optimizer) != empty
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32)) and digest(torch.tensor(1.5).bfloat16())
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))
    assert digest(sparse) == digest(sparse.clone()) != digest(2 * sparse)


def test_loops_that_are_not_installed_are_named() -> None:
    assert len(LOOPS) >= 80
    for name, script in LOOPS.items():
        assert script.name == name and script.title and script.steps >= 12
        assert loops.missing(name) is None or script.needs
