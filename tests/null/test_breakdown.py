"""Breakdowns add up: to the simulated peak, and to all that autograd saves, to the byte; and say what bytes are for."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from build import Step, random_step
from graphs import lstm_steps, random_steps, training_step

from benchmarks.lib.baselines import all_light, per_stage
from lightning_memopt.cli import main
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor, fingerprint
from lightning_memopt.plan import Plan, simulate, write_plan
from lightning_memopt.report import breakdown
from lightning_memopt.solvers.recompute.baselines import mirror
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable

POLICIES = [keep_all, mirror, all_light, per_stage, echo]


def rebuild_most(graph: Graph) -> tuple:
    """Nothing is held but what must be: long segments, with their peak on the way."""
    roll = Rollout(graph)
    for p, tensor in sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at):
        roll.serve([(p, tensor)], set(unrepeatable(graph)))
    return roll.lives()


@pytest.mark.parametrize("policy", [*POLICIES, rebuild_most])
@pytest.mark.parametrize("seed", range(30))
def test_parts_add_up_to_the_peak(policy, seed: int) -> None:
    rng = random.Random(seed)
    graph = training_step(random_steps(rng, rng.randint(2, 60)), inputs={"input": rng.randint(1, 64)})
    if seed % 2:
        graph = random_step(rng, 20, mutation=policy is not rebuild_most)
    lives = policy(graph)
    found = breakdown.at_peak(graph, lives)
    assert found.total == simulate(graph, lives).predicted.peak_nbytes
    assert found.total == sum(found.by(0).values()) == sum(found.by(1).values())
    assert set(found.by(1)) <= set(breakdown.STRUCTURES)
    asked = {s.tensor for s in graph.saves if s.unpacked_at and graph.tensors[s.tensor].born_at != BEFORE}
    kept = breakdown.saved(graph, lives)
    assert kept.total == sum(graph.tensors[t].nbytes for t in asked)
    assert set(kept.by(1)) <= set(breakdown.FATES)


def test_a_peak_within_a_segment_is_counted() -> None:
    """Rebuilding c at the first unpack makes a and b on the way; 300 bytes more than anything at rest."""
    step = Step()
    w = step.given(8)
    (a,) = step.op(w, makes=(200,), scope="net.0", name="wide")
    (b,) = step.op(a, makes=(100,), scope="net.1", workspace=7)
    (c,) = step.op(b, makes=(10,), saves=("out",), scope="net.2#1")
    step.op(c, makes=(5,), saves=("out",), scope="head", recomputable=False)
    graph = step.build(gradient=40)
    lives = rebuild_most(graph)
    found = breakdown.at_peak(graph, lives)
    assert found.total == simulate(graph, lives).predicted.peak_nbytes
    assert found.nbytes["net.*", "rebuilt"] == 300
    assert found.nbytes["net.*", "workspace"] == 7


def test_what_bytes_are_for() -> None:
    step = Step()
    w = step.given(8)
    (a,) = step.op(w, makes=(100,), saves=("out",), scope="h.0.mlp#1")
    (b,) = step.op(a, makes=(10,), scope="h.1.mlp", saves=())
    step.op(b, makes=(1000,), saves=("out",), scope="head")
    graph = step.build(gradient=1)
    found = breakdown.at_peak(graph, keep_all(graph))
    assert found.by(0)["h.*.mlp"] == 110 and found.by(0)["head"] == 1000
    assert found.by(1)["feature maps"] == 1100 and found.by(1)["in use"] == 10 and found.by(1)["weights"] == 8


def test_what_was_there_before_the_step_is_no_gradient() -> None:
    """The data set, or another model, counts beside the step; only gradients that are accumulated into count as gradients, not
    what is passed from one backward op to the next."""
    step = Step()
    w = step.given(8)
    step.given(500, kind="temporary")
    step.given(8, kind="gradient")
    step.op(w, makes=(100,), saves=("out",))
    graph = step.build(gradient=40)
    at_peak = breakdown.at_peak(graph, keep_all(graph)).by(1)
    assert at_peak["outside the step"] == 500 and at_peak["gradients"] == 8 and at_peak["weights"] == 8
    assert at_peak["in use"] == 40


@pytest.mark.parametrize("updated", [False, True])
def test_gradients_are_those_of_parameters(updated: bool) -> None:
    """They outlive backward, or an update within backward reads them; temporaries of backward do neither."""
    step = Step()
    w = step.given(8)
    step.op(w, makes=(100,), saves=("out",))
    graph = step.build(gradient=40)
    (backward,) = (op for op in graph.ops if op.phase == "backward")
    end = len(graph.points)
    gradient = Tensor(
        id=len(graph.tensors), name="w.grad", nbytes=8, kind="gradient", storage=len(graph.tensors), born_at=backward.at,
        freed_at=backward.at if updated else end,
    )  # fmt: skip
    update = Op(id=len(graph.ops), name="sgd", phase="update", inputs=(gradient.id,) * updated, outputs=(), at=end)
    graph = replace(
        graph, tensors=(*graph.tensors, gradient), ops=(*graph.ops, update), points=(*graph.points, Point("op", update.id))
    )
    found = breakdown.at_peak(graph, keep_all(graph)).by(1)
    assert found["gradients"] == 8 and found["in use"] == 40


def test_every_purpose_has_the_colour_of_the_page() -> None:
    page = (Path(breakdown.__file__).parent / "page" / "assets" / "page.js").read_text()
    colours = page.partition("const PURPOSES = {")[2].partition("};")[0]
    assert dict(re.findall(r'"([^"]+)": "(#\w+)"', colours)) == breakdown.COLOURS
    assert set(breakdown.COLOURS) == set(breakdown.STRUCTURES)
    assert len(set(breakdown.COLOURS.values())) == len(breakdown.COLOURS)


def test_the_command_prints_bytes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    graph = training_step(lstm_steps(40), inputs={"input": 1})
    lives = echo(graph)
    predicted = simulate(graph, lives).predicted
    plan = Plan(
        fingerprint=fingerprint(graph),
        lives=lives,
        solver="Echo",
        budget_nbytes=predicted.peak_nbytes,
        predicted=predicted,
        unmodified_peak_nbytes=simulate(graph, keep_all(graph)).predicted.peak_nbytes,
    )
    file, picture = str(tmp_path / "plan.json"), tmp_path / "bars.png"
    write_plan(file, plan, graph)
    assert main(["breakdown", file, "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "feature maps" in printed and "held to rebuild" in printed and "Mirror" in printed
    assert picture.stat().st_size > 1000
    assert main(["explain", file]) == 0
    peak, *helps = capsys.readouterr().out.partition("At the peak: ")[2].splitlines()
    assert "feature maps" in peak and any("Half the batch size saves" in h for h in helps), helps
    assert main(["breakdown", str(tmp_path / "none.json")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["breakdown", file, "--png", str(picture)]) == 2
    assert capsys.readouterr().err.endswith("Install it with: pip install 'lightning-memopt[bench]'\n")
    _into_a_closed_pipe("explain", file)
    _into_a_closed_pipe("breakdown", file)


def _into_a_closed_pipe(*words: str) -> None:
    """`memopt ... | head`: a reader that has gone is not an error."""
    command = [sys.executable, "-m", "lightning_memopt.cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
