"""The fuzzer: a few of its cases, those that were wrong once, and proof that it would notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.robustness import loops_count
from benchmarks.robustness.fuzz import Worker, fuzz
from benchmarks.robustness.fuzzing import loop_runs
from benchmarks.robustness.fuzzing.case import Case, Departure, Node, Step, draw
from benchmarks.robustness.fuzzing.loop import FEATURES, Loop, draw_loop, read
from benchmarks.robustness.fuzzing.loop_runs import judge_loop
from benchmarks.robustness.fuzzing.runs import judge, ran
from benchmarks.robustness.fuzzing.shrink import shrunk
from benchmarks.robustness.loops_judge import RESTS
from lightning_memopt.runtime.engine import rebuild
from lightning_memopt.session.judge.states import Running

pytestmark = pytest.mark.usefixtures("deterministic")

SEEDS = range(12)
PLAIN = Case(seed=1, nodes=tuple(Node(op, 0, 1, 1) for op in ("gated", "tanh", "dropout", "linear")), steps=(Step(8),) * 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_are_those_of_the_plain_run(seed: int) -> None:
    finding = judge(draw(seed))
    assert finding is None, f"{finding}\n{draw(seed).to_json()}"


@pytest.mark.parametrize("held", [0.0, 0.1, 0.3])
def test_a_gradient_in_the_forward_that_no_observed_step_took(held: float) -> None:
    """Autograd asks in the middle of the forward for what the plan has only later: nothing else is let go for that."""
    nodes = tuple(Node(op, 0, 0, 3) for op in ("residual", "celled", "added"))
    departs = (Departure(0, "inner", 4),), (Departure(1, "inner", 3), Departure(2, "extra", 1))
    steps = (Step(8), Step(8), *(Step(8, during=during) for during in departs))
    finding = judge(Case(seed=10, nodes=nodes, steps=steps, plan=10, held=held, observed=2))
    assert finding is None, finding


FOUND = {
    # a layer is left out, and its input stands in for its output: a segment rebuilds it on demand for another op, and it stays
    "rebuilt for another op": Case(
        seed=72485,
        nodes=(
            Node("half", 0, 0, 0),
            Node("residual", 0, 0, 0),
            Node("embedded", 0, 0, 0),
            Node("softmax", 0, 0, 0),
            Node("reversed", 0, 1, 6),
            Node("layer_norm", 4, 0, 4),
            Node("noisy", 1, 0, 3),
            Node("linear", 0, 0, 4),
        ),
        steps=(Step(8), Step(8, during=(Departure(4, "skip", 5),))),
        plan=36325,
        held=0.0,
        observed=1,
    ),
    # a gradient in the forward is taken for the plan's own one, many ops later, whose graph is freed then
    "taken for a later gradient": Case(
        seed=934,
        nodes=(
            Node("half", 0, 0, 0),
            Node("leaky", 0, 0, 0),
            Node("tanh", 0, 0, 0),
            Node("penalised", 3, 0, 6),
            Node("spectral", 0, 0, 0),
            Node("tanh", 1, 0, 0),
            Node("windowed", 0, 0, 0),
            Node("tanh", 0, 0, 0),
        ),
        steps=(Step(8), Step(8), Step(8, during=(Departure(0, "inner", 0),))),
        plan=63705,
        held=0.6,
        observed=1,
    ),
    # a gradient in the forward fetched a tensor right after the op behind which it is dropped: it was dropped again
    "fetched at its fence": Case(
        seed=1536,
        nodes=(Node("square", 0, 0, 0), Node("penalised", 0, 0, 0)),
        steps=(Step(8), Step(8)),
        plan=19351,
        held=0.1,
        away=True,
        observed=1,
    ),
    # a new op saves a tensor after a gradient in the forward has let go of what that would be rebuilt from
    "saved by a new op": Case(
        seed=72492,
        nodes=(
            Node("pooled", 0, 2, 2),
            Node("recurred", 2, 2, 7),
            Node("layer_norm", 1, 1, 2),
            Node("scaled", 0, 0, 5),
            Node("penalised", 0, 0, 2),
            Node("normed", 3, 0, 4),
            Node("gelu", 0, 0, 6),
            Node("double", 2, 0, 6),
        ),
        steps=(Step(8), Step(8), Step(8), Step(8, during=(Departure(2, "hold", 4), Departure(4, "extra", 5)))),
        optimizer="adamw",
        plan=42262,
        held=0.6,
        observed=3,
    ),
    # attention draws no numbers here: a rebuild that sets the generator takes 5,056 bytes that no plan knows
    "the generator's state": Case(
        seed=73551,
        nodes=(Node("tanh", 0, 0, 0), Node("scaled_attention", 0, 0, 0), Node("tanh", 0, 0, 0)),
        steps=(Step(8), Step(8)),
        plan=29091,
        held=0.3,
        observed=1,
    ),
    # after a step that writes where none did, its in-place op was taken for one that does not run again, in every later step
    "a template of another step": Case(
        seed=80157,
        nodes=(
            Node("tanh", 0, 0, 0),
            Node("tanh", 0, 0, 0),
            Node("cumsum", 0, 0, 1),
            Node("reversed", 1, 1, 4),
            Node("tanh", 0, 0, 0),
            Node("copied", 5, 2, 4),
            Node("tanh", 0, 0, 0),
            Node("celled", 0, 8, 1),
        ),
        steps=(Step(8), Step(8), Step(8, during=(Departure(3, "in place", 5),)), Step(8)),
        plan=3,
        held=0.6,
        observed=1,
    ),
    # what is made again for a gradient in the forward was taken for a stranger's by the op that reads it, and held
    "gradients in the forward": Case(
        seed=73044,
        nodes=tuple(Node("penalised", 0, 0, k) for k in range(12)),
        steps=(Step(8), Step(8)),
        plan=53373,
        held=0.1,
        observed=1,
    ),
    # noise where the plan has a write: no state was noted, and what was made of it was let go, to be made again from the noise
    "noise without a state": Case(
        seed=26,
        nodes=(Node("noisy", 0, 0, 0), Node("square", 0, 0, 0)),
        steps=(Step(8, during=(Departure(0, "data", 4),)), Step(8)),
        plan=51617,
        held=0.6,
        observed=1,
    ),
    # a value is not used: what a gradient in the forward rebuilt was let go with it, and what it was made from was gone by then
    "nothing left to start from": Case(
        seed=1,
        nodes=(Node("penalised", 0, 0, 0), Node("tanh", 0, 0, 0), Node("penalised", 1, 0, 0), Node("tanh", 0, 0, 0)),
        steps=(Step(8), Step(8, during=(Departure(3, "extra", 4),))),
        plan=1,
        held=0.0,
        observed=1,
    ),
    # backward asks for what no observed backward asked for: a factory's tensor, let go when nothing was to be rebuilt from it
    "asked for the first time": Case(
        seed=7100246,
        nodes=(
            Node("penalised", 0, 0, 3),
            Node("tanh", 0, 0, 0),
            Node("tanh", 0, 0, 0),
            Node("penalised", 0, 0, 0),
            Node("tanh", 4, 0, 0),
            Node("tanh", 0, 0, 0),
            Node("added", 0, 0, 7),
        ),
        steps=(Step(8), Step(8, during=(Departure(4, "no grad", 7),))),
        plan=1124,
        held=0.0,
        observed=1,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_fuzzer_found(name: str) -> None:
    finding = judge(FOUND[name])
    assert finding is None, finding


def test_an_error_after_early_updates() -> None:
    """User code writes into an input that backward needs after a parameter is updated: a warning says that half a step is left,
    and what comes after it is not compared.
    """
    steps = *(Step(8),) * 3, Step(8, after=("input",))
    case = Case(seed=1125218, nodes=(Node("transposed", 1, 0, 5),), steps=steps, plan=60864, held=0.0, early=True, observed=1)
    ours = ran(case, planned=True)
    assert 3 in (ours.halfway, ours.refused)  # the Python engine refuses by an error of this package
    assert judge(case) is None


def test_plans_are_in_force() -> None:
    """What is compared was rebuilt."""
    assert ran(PLAIN, planned=True).planned


def test_a_wrong_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilds that are wrong: the first planned step compares checksums, and refuses them; later ones train on."""
    assert judge(PLAIN) is None
    right = rebuild.run

    def wrong(call, versions, survives):  # type: ignore[no-untyped-def]
        right(call, versions, survives)
        for _, made in call.made:
            value = versions[made].holding.value if made in versions else None
            if value is not None and value.is_floating_point():
                versions[made].holding.rebuilt(value.mul_(1.5))

    monkeypatch.setattr("lightning_memopt.runtime.engine.planned.run", wrong)
    verified = judge(PLAIN)
    assert verified is not None and verified.kind == "error" and "RebuildMismatchError" in verified.text
    monkeypatch.setattr(Running, "verifies", False)
    unverified = judge(PLAIN)
    assert unverified is not None and unverified.kind == "bits"


def test_what_fails_is_made_small() -> None:
    """One node and one step are left of a case that fails because of them."""
    departs = Step(8, during=(Departure(2, "extra", 1), Departure(3, "hold", 1)))
    case = dataclasses.replace(draw(3), steps=(Step(8), departs) * 4)

    def fails(smaller: Case) -> bool:
        return any(departure.what == "hold" for step in smaller.steps for departure in step.during)

    small = shrunk(case, fails)
    assert len(small.steps) == 1 and len(small.steps[0].during) == 1


def test_a_case_is_read_as_it_was_written() -> None:
    for seed in range(50):
        assert read(draw(seed).to_json()) == draw(seed)
        assert read(draw_loop(seed).to_json()) == draw_loop(seed)


# -- loops -----------------------------------------------------------------------------------------------

counts = pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")
LOOP = Loop(seed=1, nodes=PLAIN.nodes, steps=8, rows=64, observed=1)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process that counts allocations."""
    worker = Worker()
    yield worker
    worker.close()


@counts
@pytest.mark.parametrize("seed", range(4))
def test_random_loops_are_those_of_the_plain_run(worker: Worker, seed: int) -> None:
    loop = draw_loop(seed)
    finding = worker.judge(loop)
    assert finding is None, f"{finding}\n{loop.to_json()}"


FOUND_LOOPS = {
    # a checkpoint calls a module in the middle of a backward whose hooks have updated parameters: the step was taken for over
    "a checkpoint after updates": Loop(
        seed=14,
        nodes=(Node("normed", 2, 0, 1), Node("checkpointed", 0, 1, 6), Node("layer_norm", 2, 0, 3), Node("gated", 0, 0, 2)),
        features=("hooks",),
        steps=8,
        share=1.0,
        observed=1,
    ),
    # an op gave a storage another size, and its bytes counted twice: the plain peak was refused
    "made larger by an op": Loop(seed=3, nodes=(Node("resized", 0, 0, 0),), steps=8, share=1.0, observed=1),
    # small saved tensors were evicted that are made from a large buffer, and the buffer stayed for them
    "evicted, and made from more": Loop(seed=5300, nodes=(Node("scratch", 0, 0, 0),), steps=8, share=1.0, observed=1),
    # what autograd reads through an earlier save of the same memory was made again, and stayed after it was released
    "written after it was saved": Loop(
        seed=5158,
        nodes=(
            Node("dropout", 0, 0, 0),
            Node("convolved", 0, 0, 0),
            Node("celled", 0, 0, 0),
            Node("embedded", 0, 0, 0),
            Node("celled", 0, 3, 1),
        ),
        steps=8,
        share=1.0,
        observed=1,
    ),
    # the forward holds a weight that autocast keeps, and a rebuild for another tensor has made the same bytes elsewhere
    "a gradient in the forward of a weight that is held": Loop(
        seed=33, nodes=(Node("penalised", 0, 0, 1),), features=("forwards", "parts", "autocast"), steps=8, share=0.0, observed=1
    ),
    # observed steps do not show why steps take more than predicted: the smaller plan that was made for them stays
    "more than predicted in every step": Loop(
        seed=547,
        nodes=(Node("glu", 0, 0, 0), Node("tanh", 0, 0, 0)),
        features=("forwards", "autocast"),
        steps=8,
        rows=64,
        share=0.5,
        observed=1,
    ),
    # gradients of logits are added up, which torch does in place without a mode, and tiles run under one in each step
    "the mean of logits": Loop(seed=175, nodes=(), features=("head",), steps=8, share=0.0, observed=1),
    # a weight is written in a hook, and the logits that are made of it then take a tile: that was taken for the update's own
    "made as a weight is written": Loop(
        seed=81098, nodes=(), features=("hooks", "head", "parked"), steps=8, optimizer="adadelta", share=0.0, observed=1
    ),
    # parking everything took more than it made room for, as the first update shows it, and a refusal named that
    "a refusal that parks": Loop(
        seed=70160, nodes=(), features=("parked", "marked"), steps=8, rows=64, optimizer="adamw", share=-0.2, observed=1
    ),
}


@counts
@pytest.mark.parametrize("name", FOUND_LOOPS)
def test_what_the_fuzzer_found_in_loops(worker: Worker, name: str) -> None:
    finding = worker.judge(FOUND_LOOPS[name])
    assert finding is None, finding


def test_every_feature_is_drawn() -> None:
    drawn = {name for seed in range(200) for name in draw_loop(seed).drawn}
    assert drawn >= {*FEATURES, "scratch", "emptied", "iterated", "resized"}


def test_loops_park_optimizer_state() -> None:
    """And are the plain ones, to the bit, though they go on from checkpoints and read it."""
    loop = dataclasses.replace(LOOP, optimizer="adam", features=("parked", "restored", "state read"), every=2)
    plain, ours = loop_runs._run(loop, None), loop_runs._run(loop, "min")
    read, unread = ours["steps"][-1], ours["steps"][-2]
    assert unread["away"] == unread["parkable"] == read["parkable"] > read["away"] == 0
    assert plain["losses"] == ours["losses"] and plain["state"] == ours["state"]


def test_a_loop_that_fails_is_made_small() -> None:
    """One feature and one node are left of a loop that fails because of them."""
    loop = dataclasses.replace(LOOP, features=("teacher", "hooks", "held"), share=0.3, every=3)
    small = shrunk(loop, lambda smaller: "hooks" in smaller.features and any(node.op == "dropout" for node in smaller.nodes))
    assert small.features == ("hooks",) and [node.op for node in small.nodes] == ["dropout"] and small.every == 1


def _ran(*peaks: int, planned: int | None = None, between: int = 0) -> dict[str, Any]:
    """The results of runs of one step each; the later ones are planned for this many bytes."""
    always = {"began": 1 << 20, "promised": planned, "between": between, "dropped": 0}
    always |= dict.fromkeys(RESTS, 0)
    steps = [always | {"peak": peak, "predicted": planned if i else None} for i, peak in enumerate(peaks)]
    return {
        "status": "trained", "losses": [["0x1p0"]] * len(peaks), "steps": steps, "said": [], "output": [], "state": {},
        "generators": {}, "solves": 1, "solve_seconds": 0.1, "seconds": 1.0, "measured_by_session": None, "reports": [],
    }  # fmt: skip


def test_the_judge_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain data: what is wrong is named. The plain step takes 3 MiB and half of what it takes above 1 MiB is the budget."""
    plain, budget = 3 << 20, 2 << 20

    def found(ours: dict[str, Any], *refusals: int, holding: int = plain) -> str | None:
        answers = iter([_ran(plain, plain, plain)] + [{"status": "refused", "smallest": n, "error": "E"} for n in refusals])

        def run(loop: Loop, budget: int | str | None) -> dict[str, Any]:
            worst = budget is None and {"held", "zero first"} <= set(loop.features)
            return _ran(holding) if worst else next(answers, ours)

        monkeypatch.setattr(loop_runs, "_run", run)
        finding = judge_loop(LOOP)
        return None if finding is None else finding.kind

    kept = _ran(plain, budget, budget, planned=budget)
    assert found(kept) is None
    assert found(_ran(plain, budget + 1, budget + 1, planned=budget)) == "budget broken"
    assert found(_ran(int(1.2 * plain), budget, budget, planned=budget)) == "observed step too large"
    assert found(_ran(plain, plain, plain)) == "silent"
    between = _ran(plain, budget, budget, planned=budget, between=budget + 1)
    assert found(between) == "more between steps, silent"
    assert found(between | {"said": ["MemOpt: 2097153 bytes were in memory between an update and the next forward"]}) is None
    assert found(kept, plain) is None
    assert found(kept, plain + (1 << 16)) == "named"
    assert found(kept, plain + (1 << 16), holding=plain + (1 << 16)) is None, "a loop that holds outputs takes as much"
    assert found(kept, budget, plain) == "refused 2 times"


def test_a_run_of_the_fuzzer_tells_what_it_drew() -> None:
    lines: list[str] = []
    assert fuzz(1e-9, 0, ["loop"], lines.append) == []
    assert lines[-1] == "0 seeds from 0 on, each a loop: 0 findings {}" and lines[-2].startswith("loops: ")
