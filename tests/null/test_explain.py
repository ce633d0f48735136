"""`memopt explain`: blocks add up, questions about an op or a module are answered, a closed pipe is not an error."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from build import Step, random_step
from test_breakdown import rebuild_most

from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import Graph, fingerprint, unmodified_levels
from lightning_memopt.plan import Life, Plan, simulate, write_plan
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.report import explain
from lightning_memopt.report.blocks import block_of, blocks
from lightning_memopt.report.fates import fates, kept, operator
from lightning_memopt.report.helps import scaling_nbytes
from lightning_memopt.solvers.recompute.baselines import mirror
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import keep_all


def plan_of(graph: Graph, lives: tuple[Life, ...]) -> Plan:
    predicted = simulate(graph, lives).predicted
    return Plan(
        fingerprint=fingerprint(graph),
        lives=lives,
        solver="hand",
        budget_nbytes=predicted.peak_nbytes,
        predicted=predicted,
        unmodified_peak_nbytes=max(unmodified_levels(graph)),
    )


def layers() -> Graph:
    """Three blocks of a heavy and two light ops, and a head whose result is never made again."""
    step = Step()
    w = x = step.given(8)
    for i in range(3):
        (a,) = step.op(x, w, makes=(4000,), saves=("out",), scope=f"body.{i}.up", name="aten::addmm")
        (b,) = step.op(a, makes=(4000,), saves=("out",), scope=f"body.{i}.act#{i}", name="aten::gelu", seconds=2.0 + i)
        (x,) = step.op(b, makes=(1000,), saves=(), scope=f"body.{i}", name="aten::add.Tensor")
    step.op(x, makes=(2000,), saves=("out",), scope="head", name="aten::rand", recomputable=False)
    return step.build(gradient=40)


@pytest.mark.parametrize(
    "scope, block",
    [
        ("h.3.mlp#1", "h.3"),
        ("model.encoder.layers.11.0.linear", "model.encoder.layers.11"),
        ("lm_head#2", "lm_head"),
        ("0", "0"),
        ("", "the model itself"),
    ],
)
def test_a_block_is_a_path_up_to_its_number(scope: str, block: str) -> None:
    assert block_of(scope) == block


@pytest.mark.parametrize("policy", [keep_all, mirror, echo, rebuild_most])
@pytest.mark.parametrize("seed", range(10))
def test_blocks_add_up_to_the_plan(policy, seed: int) -> None:
    graph = random_step(random.Random(seed), 20, mutation=policy is not rebuild_most)
    plan = plan_of(graph, policy(graph))
    rows = blocks(graph, plan)
    assert sum(block.extra_seconds for block in rows) == pytest.approx(plan.predicted.extra_seconds)
    total = sum(block.nbytes(what) for block in rows for what in ("kept", "rebuilt", "parked", "never read"))
    assert total == sum(fate.tensor.nbytes for fate in fates(graph, plan))
    saved = {t for t in graph.saves_of if t in graph.producers}
    assert saved <= {fate.tensor.id for fate in fates(graph, plan)}
    assert {fate.what for fate in fates(graph, plan)} <= {"kept", "rebuilt", "never read"}


def test_every_reason_is_true() -> None:
    graph = layers()
    assert {why for why, *_ in kept(graph, plan_of(graph, keep_all(graph)))} == {
        "the budget has room for it",
        "rand is not run again",
    }
    dropped = plan_of(graph, rebuild_most(graph))
    by_what = {fate.tensor.id: fate for fate in fates(graph, dropped) if fate.saved}
    assert {fate.why for fate in by_what.values() if fate.what == "rebuilt"} == {"light to rebuild"}
    assert [fate.what for fate in by_what.values()] == ["rebuilt"] * 6 + ["kept"]
    held = mirror(replace(graph, ops=tuple(replace(op, heavy=op.name == "aten::addmm") for op in graph.ops)))
    starts = {operator(fate.op.name) for fate in fates(graph, plan_of(graph, held)) if fate.why == "rebuilds start from it"}
    assert starts == {"addmm"}, "gelu runs again, and reads it"


def test_the_table_has_a_row_for_each_block_and_the_plan_above_it() -> None:
    graph = layers()
    text = explain.explain(plan_of(graph, rebuild_most(graph)), graph)
    assert text.startswith("Plan by hand for ")
    for name in ("body.0", "body.1", "body.2", "head"):
        assert sum(line.startswith(f"│ {name} ") for line in text.splitlines()) == 1
    assert "rand is not run again" in text


def test_questions_about_an_operator_and_a_module() -> None:
    graph = layers()
    plan = plan_of(graph, rebuild_most(graph))
    for name in ("gelu", "aten::gelu"):
        text = explain.of_operator(plan, graph, name)
        assert text.count("body.") == 3 and "head" not in text and "rebuilt" in text
    inside = explain.of_module(plan, graph, "body.1")
    assert inside.count("body.1") == 4 and "body.0" not in inside, "the title, and three ops"
    assert explain.of_module(plan, graph, "body").count("body.") == 9
    assert explain.of_module(plan, graph, "body.*.act").count(".act") == 4
    assert "not saved" in explain.of_operator(plan, graph, "add")


@pytest.mark.parametrize(
    "ask, name, nearest",
    [("operator", "gelo", "gelu"), ("module", "body.7", "body.0"), ("module", "hed", "head"), ("operator", "?", "add, addmm")],
)
def test_a_name_that_matches_nothing_names_the_nearest(ask: str, name: str, nearest: str) -> None:
    graph = layers()
    plan = plan_of(graph, keep_all(graph))
    asked = {"operator": explain.of_operator, "module": explain.of_module}[ask]
    with pytest.raises(ConfigError, match=f"no {ask} of this step is called") as raised:
        asked(plan, graph, name)
    assert nearest in str(raised.value)


def test_what_grows_with_the_batch_is_not_what_does_not() -> None:
    graph = layers()
    peak = at_peak(graph, keep_all(graph))
    fixed = sum(peak.by(1)[name] for name in ("weights", "gradients", "optimizer state"))
    assert scaling_nbytes(peak) == peak.total - fixed > 0


@pytest.fixture
def file(tmp_path: Path) -> str:
    graph = layers()
    write_plan(tmp_path / "plan.json", plan_of(graph, rebuild_most(graph)), graph)
    return str(tmp_path / "plan.json")


def test_the_command(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file]) == 0
    text = capsys.readouterr().out
    table, end = text.split("What would help most:\n")
    assert "│ body.0" in table and "At the peak: " in table
    assert "body.0 takes most of the extra time: 20000.00 of 41000.00 ms" in end, "each rebuild begins there: 5 times 4 seconds"
    assert "10 % more budget" in end and "10 % less budget" in end and "Half the batch size" in end
    assert main(["explain", file, "--seconds", "0"]) == 0
    assert capsys.readouterr().out == table
    assert main(["explain", file, "--tensors"]) == 0
    assert "rebuild " in capsys.readouterr().out
    assert main(["explain", file, "--op", "gelu", "--module", "head"]) == 0
    text = capsys.readouterr().out
    assert "gelu: 3 in a forward" in text and "head: 1 ops" in text
    assert main(["explain", file, "--op", "gelo"]) == 2
    said = capsys.readouterr()
    assert not said.out and "Similar names: gelu" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--tensors",), ("--op", "gelu"), ("--module", "body"), ("--help",)])
def test_a_reader_that_has_gone_is_no_error(file: str, words: tuple[str, ...]) -> None:
    """`memopt explain plan.json | head`"""
    command = [sys.executable, "-m", "lightning_memopt.cli", "explain", file, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
