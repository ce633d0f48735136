"""Promises that need no torch: frontiers, files, messages. Others are kept in the files they belong to, by id."""

from __future__ import annotations

import ast
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from graphs import random_steps, training_step
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_file import VALUES, mutate

import lightning_memopt
from lightning_memopt import jsonio
from lightning_memopt.errors import InfeasibleError, MemOptError, PlanFileError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import lower, plan_from_json, plan_to_json, simulate, validate
from lightning_memopt.solvers import planner

PACKAGE = Path(next(iter(lightning_memopt.__path__)))


def graph_of(seed: int, steps: int = 14) -> Graph:
    """A random step with tensors of up to 4 MiB: a plan must save more than the margin that it leaves."""
    graph = training_step(random_steps(random.Random(seed), steps))
    return replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 16) for t in graph.tensors))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1.2), min_size=2, max_size=8), st.sampled_from(["throughput", "flops"]))
def test_p7_a_lower_budget_never_gives_a_higher_peak(seed: int, shares: list[float], objective: planner.Objective) -> None:
    """Nor a faster plan; every plan keeps its budget, is valid, and is as long as it says."""
    graph = graph_of(seed)
    frontier = planner.solve(graph, objective=objective)
    peaks, costs = [], []
    for budget in sorted(int(share * frontier.unmodified_peak_bytes) for share in shares):
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            assert not peaks and error.smallest_nbytes is not None and error.smallest_nbytes > budget
            continue
        p = plan.predicted
        assert p.peak_bytes <= budget and validate(graph, plan.lives, lower(graph, plan.lives)).ok
        assert simulate(graph, plan.lives).predicted.peak_bytes == p.peak_bytes
        peaks.append(p.peak_bytes)
        costs.append((p.extra_flops, p.seconds) if objective == "flops" else p.seconds)
    assert peaks == sorted(peaks)
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_p8_nothing_is_run_again_where_the_budget_has_room(seed: int) -> None:
    """From the unmodified peak on the plan is the unmodified step, and no plan has a peak above it."""
    frontier = planner.solve(graph_of(seed))
    for budget in (frontier.unmodified_peak_bytes, 2 * frontier.unmodified_peak_bytes):
        assert frontier.plan(budget).predicted.replayed_ops == 0
    assert all(c.predicted.peak_bytes <= frontier.unmodified_peak_bytes for c in frontier.candidates)


class Clock:
    """A clock that goes on by `tick` seconds whenever it is read."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("tick", [0.0, 0.1, 0.4, 1.5, 1e9])
def test_p32_time_limit_gives_a_valid_plan_or_the_unmodified_step(tick: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the solvers are, wherever the limit falls: what is given is valid and keeps its budget."""
    monkeypatch.setattr(planner, "time", Clock(tick))
    for seed in range(4):
        graph = graph_of(seed, 25)
        said: list[str] = []
        frontier = planner.solve(graph, limit_seconds=30.0, say=said.append)
        stopped = any("time limit" in line for line in said)
        assert stopped or tick < 1e9
        assert tick or not stopped
        plans = [frontier.plan(frontier.smallest_bytes), frontier.plan(1 << 60)]
        for plan in plans:
            assert plan.predicted_peak_bytes <= plan.budget_bytes
            assert validate(graph, plan.lives, lower(graph, plan.lives)).ok
        assert plans[1].predicted.replayed_ops == 0 or plans[1].predicted.seconds < 0
        assert tick < 1e9 or plans[0].predicted.replayed_ops == 0, "there was no time for anything but the unmodified step"


def test_p32_a_solver_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that would give plans for ever is left at the limit, by the wall clock."""

    def endless(graph: Graph) -> Iterator[tuple[str, object]]:
        while True:
            time.sleep(0.01)
            yield "slow", planner.keep_all(graph)

    monkeypatch.setattr(planner, "_smallest", endless)
    began = time.perf_counter()
    frontier = planner.solve(graph_of(0), limit_seconds=0.2)
    assert time.perf_counter() - began < 60
    assert frontier.plan(frontier.unmodified_peak_bytes).predicted.replayed_ops == 0


# -- P29: files are data ---------------------------------------------------------------------------------

EVIL = [
    b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    b"cos\nsystem\n(S'true'\ntR.",
    b"PK\x03\x04archive/data.pkl",
    b'{"__class__": "os.system", "args": ["true"]}',
    b'{"py/reduce": [{"py/type": "os.system"}, {"py/tuple": ["true"]}]}',
    b"!!python/object/apply:os.system ['true']",
    b"__import__('os').system('true')",
    b'{"format": "lightning_memopt.plan", "schema": 1, "plan": "lightning_memopt.plan:Plan", "graph": "os:system"}',
    b'{"a": NaN}',
    b'{"a": 1, "a": 2}',
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + b"1" * 5000 + b"}",
    b'{"a": 1e999999}',
    b'{"a": "\\ud800"}',
    b"\xff\xfe{\x00}\x00",
    b"",
    b"null",
]


@pytest.mark.parametrize("data", EVIL, ids=lambda data: ascii(bytes(data[:24])))
def test_p29_evil_files_are_refused_and_run_nothing(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("builtins", "exec"), ("importlib", "import_module")):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, **__: pytest.fail("something of the file was run"))
    with pytest.raises(PlanFileError):
        plan_from_json(jsonio.parse(data))


def real_plan() -> dict:
    """What a plan file holds, of a step with every kind of op."""
    graph = next(
        g for g in map(graph_of, range(99)) if any(op.mutates for op in g.ops) and any(op.state_nbytes for op in g.ops)
    )
    frontier = planner.solve(graph)
    return plan_to_json(frontier.plan(frontier.smallest_bytes), graph)


MUTATIONS = 1_500  # 100,000 of another seed were tried once


def test_p29_no_change_of_a_plan_file_raises_anything_else() -> None:
    """Changes of its bytes and of its content, by the ten thousand: a plan that may be obeyed, or PlanFileError."""
    rng, good = random.Random(29), real_plan()
    text = json.dumps(good, separators=(",", ":")).encode()
    plan_from_json(jsonio.parse(text))
    passed = 0
    for i in range(MUTATIONS):
        data = bytearray(text)
        if i % 4 == 0:
            obj = json.loads(text)
            for _ in range(rng.choice((1, 1, 2, 4))):
                mutate(obj, rng)
            data = bytearray(json.dumps(obj, allow_nan=True).encode())
        else:
            for _ in range(rng.choice((1, 1, 2, 8))):
                at, size = rng.randrange(len(data)), rng.choice((0, 1, 1, 2, 40))
                new = rng.choice((bytes([rng.randrange(256)]), json.dumps(rng.choice(VALUES)).encode(), b"", b"-", b"0", b"9"))
                data[at : at + size] = new
        try:
            plan, graph = plan_from_json(jsonio.parse(bytes(data)))
        except PlanFileError as error:
            assert len(str(error)) < 1000
            continue
        passed += 1
        assert lower(graph, plan.lives) is not None
    assert 0 < passed < MUTATIONS // 2


ALLOWED_IMPORTS = {
    "__init__.py",  # by a table
    "_registration.py",  # by a constant, as all that have no other remark
    "callbacks/monitor.py",  # from the package that the user's Trainer is of
    "cli.py",  # by what the user typed
    "runtime/codecs/block.py",
    "telemetry/nvml.py",
}


def test_p29_names_in_files_import_nothing() -> None:
    """Few files import by name, and none of them reads a plan: what they import is written there, or was typed."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            if name.startswith("importlib.") and name.endswith(("import_module", "find_spec", "spec_from_file_location")):
                found.add(str(path.relative_to(PACKAGE)))
            assert not name.endswith(("runpy.run_path", "imp.load_source", "pydoc.locate", "pkgutil.resolve_name")), path
    assert found == ALLOWED_IMPORTS


# -- P34: messages ---------------------------------------------------------------------------------------

REMEDY = re.compile(
    r"\b(set|use|give|raise|make|remove|write|leave|add|check|enter|ask|copy|solve|install|fix|measure|mark|observe|keep|change"
    r"|run|do not)\b",
    re.IGNORECASE,
)


def texts(node: ast.expr) -> Iterator[str]:
    """The literal parts of a message, `{}` where a value is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from texts(part)
    elif isinstance(node, ast.FormattedValue):
        yield "{" + ast.unparse(node.value) + "}"
    elif isinstance(node, ast.BinOp):
        yield from texts(node.left)
        yield from texts(node.right)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
    else:
        yield "{" + ast.unparse(node) + "}"


def raised() -> Iterator[tuple[str, str]]:
    """(where, message) of every error of ours that is made in the package."""
    classes = {name for name, value in vars(lightning_memopt.errors).items() if isinstance(value, type)}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in classes and node.args:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", "".join(texts(node.args[0]))


SAID = list(raised())


def test_p34_there_are_messages() -> None:
    assert len(SAID) > 40


@pytest.mark.parametrize(("where", "message"), SAID, ids=[where for where, _ in SAID])
def test_p34_every_message_says_what_and_what_to_do(where: str, message: str) -> None:
    """What was met is named or numbered, and there is a verb in the imperative. `ACCEPTED` is a list of what to write."""
    message = message.replace("{ACCEPTED}", "write '8GiB'")
    assert len(message.split()) >= 5 or message.startswith("{"), message
    assert REMEDY.search(message) or message in PASSED_ON, message


PASSED_ON = {"{os.fspath(path)}: {error}", "{str(error)}"}
"""Messages that are made elsewhere, where they are checked too."""


def test_p34_the_check_itself_finds() -> None:
    assert not REMEDY.search("the budget is wrong")
    assert issubclass(PlanFileError, MemOptError)
