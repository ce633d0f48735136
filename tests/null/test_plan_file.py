"""A plan file is read back as it was written, and whatever else it may be is refused, never obeyed."""

from __future__ import annotations

import copy
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build import Step, random_step

from lightning_memopt import jsonio
from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import BEFORE, Copy, Graph, fingerprint, unmodified_levels
from lightning_memopt.plan import Life, Plan, lower, plan_from_json, plan_to_json, read_plan, simulate, write_plan
from lightning_memopt.solvers.rollout import Rollout, keep_all

SCHEMA_3 = Path(__file__).parent / "data" / "plan_of_schema_3.json"


def plan_of(graph: Graph, lives: tuple[Life, ...]) -> Plan:
    return Plan(
        fingerprint=fingerprint(graph),
        lives=lives,
        solver="by hand",
        budget_nbytes=10**6,
        predicted=simulate(graph, lives, lower(graph, lives)).predicted,
        unmodified_peak_nbytes=max(unmodified_levels(graph)),
        step_seconds=0.1,
        lower_bound_seconds=1e-17,
        solve_seconds=2.0,
    )


def small() -> tuple[Plan, Graph]:
    """Three ops in a row, all saved; the middle one is held. Lives: 1 rebuilt, 2 held, 3 rebuilt."""
    step = Step()
    t = step.given()
    for name in ("linear", "gelu", "linear"):
        (t,) = step.op(t, saves=("out",), name=name)
    graph = step.build()
    roll = Rollout(graph)
    roll.serve(sorted((s.unpacked_at[0], s.tensor) for s in graph.saves), {2})
    return plan_of(graph, roll.lives()), graph


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, *small())
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for seed in range(30):
        graph = replace(random_step(random.Random(seed)), computed=seed % 3 > 0)
        if seed % 2:  # of what rests
            ends = len(graph.points)
            out = Copy(what="gradient", tensor=0, lane="out", after=ends - 2, before=ends, seconds=0.5)
            back = Copy(what="state", tensor=1, lane="in", after=BEFORE, before=0, seconds=0.25, neighbour=0)
            graph = replace(graph, copies=(out, back))
        plan = plan_of(graph, keep_all(graph))
        write_plan(tmp_path / "plan.json", plan, graph)
        again, same = read_plan(tmp_path / "plan.json")
        assert again == plan
        assert all(getattr(same, field) == getattr(graph, field) for field in graph.__dataclass_fields__)


def test_a_plan_file_of_schema_3_is_read(tmp_path: Path) -> None:
    """The file was written by the version before schema 4, with `plan_of` and `write_plan` as they were then."""
    plan, graph = read_plan(SCHEMA_3)
    assert plan.budget_nbytes == 10**6 and plan.unmodified_peak_nbytes == 52 and plan.predicted.reserved_nbytes == 512
    assert (plan.predicted_peak_nbytes, plan.predicted.rebuilt_nbytes, plan.predicted.rebuilt_ops) == (37, 24, 3)
    assert (plan.predicted.moved_nbytes, plan.predicted.tier_nbytes) == (18, 9)
    assert [life.tensor for life in plan.lives if life.how == "rebuild"] == [1, 4, 5]
    assert [(life.form, life.parked_nbytes) for life in plan.lives if life.how == "fetch"] == [("host", 8), ("bools@disk", 1)]
    write_plan(tmp_path / "plan.json", plan, graph)
    text = (tmp_path / "plan.json").read_text()
    assert '"schema": 9,' in text and '"budget_nbytes": 1000000,' in text
    again, same = read_plan(tmp_path / "plan.json")
    assert again == plan and fingerprint(same) == fingerprint(graph)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("budget_bytes", "budget_nbytes"),
        ("replayed_ops", "rebuilt_ops"),
        ("away_nbytes", "parked_nbytes"),
        ('schema": 3', 'schema": 4'),
    ],
)
def test_the_fields_of_two_schemas_do_not_mix(old: str, new: str) -> None:
    with pytest.raises(PlanFileError, match="missing fields"):
        plan_from_json(json.loads(SCHEMA_3.read_text().replace(old, new)))


def test_a_wrong_field_of_schema_3_is_called_as_in_the_file() -> None:
    text = SCHEMA_3.read_text().replace('"budget_bytes": 1000000', '"budget_bytes": -1')
    with pytest.raises(PlanFileError, match="plan.budget_bytes: -1"):
        plan_from_json(json.loads(text))


def test_the_file_is_the_same_every_time_with_one_array_a_line(written: Path, tmp_path: Path) -> None:
    text = written.read_text()
    write_plan(tmp_path / "again.json", *read_plan(written))
    assert (tmp_path / "again.json").read_text() == text
    assert '   "how": "ror",\n' in text and '   "tensor": [1,2,3],\n' in text
    assert oct(os.stat(written).st_mode & 0o777) == "0o600"


def test_a_plan_that_would_be_refused_is_not_written(written: Path) -> None:
    plan, graph = small()
    before = written.read_bytes()
    for wrong in (
        replace(plan, lives=plan.lives[1:]),
        replace(plan, fingerprint="0" * 32),
        replace(plan, step_seconds=float("nan")),
        replace(plan, budget_nbytes=-1),
        replace(plan, solver=None),  # type: ignore[arg-type]
        replace(plan, solver=object()),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanFileError, match="plan.json' cannot be written"):
            write_plan(written, wrong, graph)
    assert written.read_bytes() == before and len(list(written.parent.iterdir())) == 1
    with pytest.raises(PlanFileError, match="cannot be written"):
        write_plan(written.parent / "nowhere" / "plan.json", plan, graph)


# -- bad files, one by one -----------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot be read"):
        read_plan(tmp_path / "none.json")


def test_not_json(written: Path) -> None:
    written.write_bytes(b"\x80\x04\x95pickled")
    with pytest.raises(PlanFileError, match="not UTF-8"):
        read_plan(written)


def test_truncated(written: Path) -> None:
    data = written.read_bytes()
    for n in range(0, len(data) - 2, 97):
        written.write_bytes(data[:n])
        with pytest.raises(PlanFileError, match="truncated"):
            read_plan(written)


def test_oversize(written: Path) -> None:
    with open(written, "ab") as file:
        file.truncate(jsonio.MAX_NBYTES + 1)  # sparse
    with pytest.raises(PlanFileError, match="64.00 MiB"):
        read_plan(written)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "another", '"format" is \'another\', not "lightning_memopt.plan"'),
        ("schema", 1, "file.schema is 1; this version knows schema 9 and 8 and 7 and 6 and 5 and 4 and 3 only"),
        ("schema", "1", "file.schema is '1'"),
        ("graph.schema", 8, "graph.schema is 8; this version knows schema 2 and 3 and 4 and 5 and 6 and 7 only"),
        ("plan", [], r"plan is \[\], not an object"),
        ("plan.fingerprint", "0" * 32, "plan.fingerprint: '0+', but the graph in this file has"),
        ("graph.device", "cuda", "plan.fingerprint"),
        ("plan.budget_nbytes", -1, "plan.budget_nbytes: -1"),
        ("plan.step_seconds", None, "plan.step_seconds: None"),
        ("plan.predicted.peak_nbytes", 1.5, "plan.predicted.peak_nbytes: 1.5"),
        ("plan.predicted.extra_seconds", -1.0, "plan.predicted.extra_seconds: -1.0"),
        ("plan.lives.tensor.2", 99, r"plan.lives.tensor\[2\]: 99"),
        ("plan.lives.tensor.0", 2, r"plan.lives.born_at\[1\]: 1, but the life of tensor 2 before it"),
        ("plan.lives.tensor.1", 0, r"plan.lives.tensor\[1\]: 0 after 1; lives are sorted"),
        ("plan.lives.tensor.1", True, r"plan.lives.tensor\[1\]: True"),
        ("plan.lives.freed_at.2", 1000, r"plan.lives.freed_at\[2\]: 1000"),
        ("plan.lives.freed_at.2", 1, r"plan.lives.freed_at\[2\]: 1 is before the birth"),
        ("plan.lives.born_at.0", 0, r"plan.lives.born_at\[0\]: 0: a rebuild begins at an unpack"),
        ("plan.lives.born_at.1", 0, r"plan.lives.born_at\[1\]: 0, but tensor 2 is made at 1"),
        ("plan.lives.how", "roo", r"plan.lives.born_at\[2\]"),
        ("plan.lives.how", "rxr", r"plan.lives.how\[1\]: 'x' is none of o \(original\), r \(rebuild\)"),
        ("plan.lives.how", "ro", "plan.lives.how: 2 entries"),
        ("plan.lives.freed_at.1", 6, "cannot be carried out: tensor 2"),
        ("graph.ops.recomputable", "010000", "cannot be carried out: tensor 3 .* is not in memory"),
    ],
)
def test_a_wrong_field_is_named(written: Path, path: str, value: object, words: str) -> None:
    obj = json.loads(written.read_text())
    *outer, last = path.split(".")
    inner: Any = obj
    for key in outer:
        inner = inner[key]
    inner[int(last) if isinstance(inner, list) else last] = value
    written.write_text(json.dumps(obj))
    with pytest.raises(PlanFileError, match=words) as raised:
        read_plan(written)
    assert "plan.json" in str(raised.value)


def test_lives_that_overlap_are_refused() -> None:
    plan, graph = small()
    again = replace(plan.lives[2], tensor=2, freed_at=len(graph.points) - 1)  # while the first life lasts
    twice = (*plan.lives[:2], again, plan.lives[2])
    with pytest.raises(PlanFileError, match=r"plan.lives.born_at\[2\]: .*the life of tensor 2 before it ends"):
        plan_from_json(plan_to_json(replace(plan, lives=twice), graph))


@pytest.mark.parametrize("obj", [None, [], "plan", {}, {"format": "lightning_memopt.plan"}])
def test_what_is_no_plan_is_refused(obj: object) -> None:
    with pytest.raises(PlanFileError):
        plan_from_json(obj)


# -- bad files by the thousand -------------------------------------------------------------------------


def accepted(obj: object) -> bool:
    """Whether `obj` is a plan file; any error but PlanFileError fails the test."""
    try:
        plan_from_json(obj)
    except PlanFileError:
        return False
    return True


VALUES = (None, True, False, -1, 0, 1, 5, 10**19, -0.0, 0.5, 1e300, "", "f", "zz", [], [0], [[0]], {}, {"a": 1})


def mutate(node: Any, rng: random.Random) -> None:
    """One random change somewhere in `node`."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return
        key = rng.choice(keys)
        child = node[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.9:
            node = child
            continue
        kind = rng.randrange(4)
        if kind == 0:
            node[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 1:
            del node[key]
        elif kind == 2 and isinstance(child, str) and child:
            at = rng.randrange(len(child))
            node[key] = child[:at] + rng.choice("01fbuoraptgi") + child[at + 1 :]
        elif isinstance(child, int):
            node[key] = child + rng.choice((-2, -1, 1, 2))
        elif isinstance(node, list):
            node.insert(key, copy.deepcopy(child))
        return


def test_random_changes_of_the_content_raise_nothing_else() -> None:
    rng = random.Random(0)
    plan, graph = small()
    good = json.dumps(plan_to_json(plan, graph))
    passed = 0
    for _ in range(2500):
        obj = json.loads(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate(obj, rng)
        passed += accepted(obj)
    assert 0 < passed < 1250  # a changed time or name is not an error


def test_random_changes_of_the_bytes_raise_nothing_else(written: Path) -> None:
    rng = random.Random(1)
    good = written.read_bytes()
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 1, 4))] = bytes(
                rng.choice(b'0123456789-.e[]{},:"fbx \x00\xff') for _ in range(rng.choice((0, 1, 1, 2)))
            )
        try:
            obj = jsonio.parse(bytes(data))
        except PlanFileError:
            continue
        accepted(obj)
