"""A graph says what is in memory when, and which model it is of."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from build import Step, random_step

from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import (
    Graph,
    base_levels,
    fingerprint,
    first_difference,
    graph_from_json,
    graph_to_json,
    resident_nbytes,
    unmodified_levels,
    workspaces,
)


def two_ops() -> Graph:
    """w (8) -> a (100) -> b (10); a and b are saved. Points: a, b, then unpack, gradient, release of b and of a."""
    step = Step()
    w = step.given(8)
    (a,) = step.op(w, makes=(100,), saves=("out",), name="linear", scope="net.0#0")
    step.op(a, makes=(10,), saves=("out",), name="relu", scope="net.1#0", workspace=50)
    return step.build(gradient=1)


def test_levels_of_a_step_counted_by_hand() -> None:
    graph = two_ops()
    assert [p.kind for p in graph.points] == ["op", "op", "unpack", "op", "release", "unpack", "op", "release"]
    # user code holds a until b is made; autograd holds it until its release
    assert base_levels(graph) == [108, 118, 8, 9, 9, 9, 10, 8]
    assert workspaces(graph) == [0, 50, 0, 0, 0, 0, 0, 0]
    assert unmodified_levels(graph) == [108, 168, 118, 119, 119, 109, 110, 108]
    assert resident_nbytes(graph) == 8
    assert graph.backward_begins == 3 and graph.saved_until(1) == 7


def test_versions_of_a_storage_are_counted_once() -> None:
    step = Step()
    (a,) = step.op(step.given(8), makes=(100,))
    (changed,) = step.op(a, makes=(), mutates=(a,))
    step.op(changed, makes=(10,), saves=("out",))
    graph = step.build(gradient=0)
    assert graph.tensors[changed].storage == graph.tensors[a].storage == a
    assert graph.overwritten == {a}
    assert base_levels(graph)[:3] == [108, 108, 118]


def test_what_was_packed_is_the_version_of_that_moment() -> None:
    """A tensor has three versions. Each save was packed at another one, and backward reads the last."""
    step = Step()
    (a,) = step.op(step.given(8), makes=(100,))
    (b,) = step.op(a, makes=(), mutates=(a,))
    (c,) = step.op(b, makes=(), mutates=(b,))
    step.op(c, makes=(10,))
    step.saves = [(1, c), (2, c), (3, c)]  # before op 1 ran, before op 2 did, and what op 2 made
    graph = step.build(gradient=0)
    assert [graph.packed(save) for save in graph.saves] == [a, b, c]


def attention() -> Graph:
    """w (8) -> a (100) and its logarithms (20), which no second run makes; both are saved, and so is what is made of a (10)."""
    step = Step()
    a, logarithms = step.op(step.given(8), makes=(100, 20), unrebuilt=1)
    step.op(a, makes=(10,), saves=("out",))
    step.saves += [(0, a), (0, logarithms)]
    return step.build(gradient=0)


def test_what_an_op_does_not_make_again() -> None:
    graph = attention()
    assert graph.anchors == {2} and list(graph.rebuilders) == [1, 3]
    assert graph_to_json(two_ops())["schema"] == 2
    obj = graph_to_json(graph)
    assert obj["schema"] == 5 and obj["unrebuilt"] == [[0, 2]]
    assert graph_from_json(json.loads(json.dumps(obj))).ops == graph.ops
    for wrong in ([[0]], [[9, 2]], [[0, 99]], [[1, 2]], [[0, 0]]):
        with pytest.raises(PlanFileError, match="unrebuilt|does not make them again"):
            graph_from_json(obj | {"unrebuilt": wrong})


def test_what_reads_and_makes_a_tensor() -> None:
    graph = two_ops()
    assert [op.id for op in graph.consumers[1]] == [1, 3]
    assert graph.producers[1].id == 0 and 0 not in graph.producers
    assert list(graph.reads(1)) == [(5, 7)]


def test_the_fingerprint_is_of_structure_not_of_times() -> None:
    graph = two_ops()
    slower = replace(graph, ops=tuple(replace(op, seconds=op.seconds * 3 + 1) for op in graph.ops), step_seconds=99.0)
    assert fingerprint(slower) == fingerprint(graph) and first_difference(graph, slower) is None
    bigger = replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes + 1) for t in graph.tensors))
    fewer = replace(graph, saves=graph.saves[:1])
    elsewhere = replace(graph, device="cuda")
    renamed = replace(graph, ops=(replace(graph.ops[0], name="conv"), *graph.ops[1:]))
    shorter = replace(graph, ops=graph.ops[:1] + graph.ops[2:])
    assert len({fingerprint(g) for g in (graph, bigger, fewer, elsewhere, renamed, shorter)}) == 6


def test_the_first_difference_is_named() -> None:
    graph = two_ops()
    renamed = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], name="gelu", scope=""), *graph.ops[2:]))
    assert first_difference(graph, renamed) == "op 1: relu in net.1#0 against gelu in the model"
    assert first_difference(graph, replace(graph, ops=graph.ops[:1])) == "2 forward ops against 1"
    assert first_difference(graph, replace(graph, saves=())) == "the tensors that autograd saves"


def same(one: Graph, other: Graph) -> bool:
    return all(getattr(one, f) == getattr(other, f) for f in one.__dataclass_fields__)


@pytest.mark.parametrize("seed", range(20))
def test_json_and_back_is_the_same_graph(seed: int) -> None:
    graph = random_step(random.Random(seed))
    assert same(graph_from_json(graph_to_json(graph)), graph)


def test_no_ops_and_requests_made_twice_survive_json() -> None:
    assert same(graph_from_json(graph_to_json(Step().build())), Step().build())
    step = Step()
    (a,) = step.op(step.given(), saves=("out",))
    step.op(a, saves=(a,))
    twice = step.build(twice=True)
    assert {len(save.unpacked_at) for save in twice.saves} == {2}
    assert same(graph_from_json(graph_to_json(twice)), twice)


@pytest.mark.parametrize(
    ("table", "column", "index", "value", "words"),
    [
        ("ops", "inputs", 1, [99], r"graph.ops.inputs\[1\]: 99 is not a whole number in 0..4"),
        ("ops", "inputs", 0, [2], r"graph.ops.inputs\[0\]: tensor 2 is not made yet"),
        ("ops", "inputs", 0, 1, r"graph.ops.inputs\[0\]: 1 is not a list"),
        ("ops", "outputs", 1, [1], r"graph.ops.outputs\[1\]: tensor 1 is made already"),
        ("ops", "outputs", 1, [], r"graph.ops.inputs\[2\]: tensor 2 is not made yet"),
        ("ops", "at", 1, 2, r"graph.points.id\[1\]: op 1, occurrence 0, is said to be at point 2"),
        ("ops", "name", 0, -1, r"graph.ops.name\[0\]: -1"),
        ("ops", "seconds", 1, -0.5, r"graph.ops.seconds\[1\]: -0.5"),
        ("ops", "seconds", 1, float("nan"), r"graph.ops.seconds\[1\]: nan"),
        ("ops", "seconds", 1, True, r"graph.ops.seconds\[1\]: True"),
        ("ops", "workspace_nbytes", 0, -1, r"graph.ops.workspace_nbytes\[0\]: -1"),
        ("ops", "flops", 0, 1.5, r"graph.ops.flops\[0\]: 1.5"),
        ("tensors", "nbytes", 2, -1, r"graph.tensors.nbytes\[2\]: -1"),
        ("tensors", "nbytes", 2, True, r"graph.tensors.nbytes\[2\]: True"),
        ("tensors", "storage", 2, 5, r"graph.tensors.storage\[2\]: 5"),
        ("tensors", "born_at", 1, -2, r"graph.tensors.born_at\[1\]: -2"),
        ("tensors", "born_at", 1, 1, r"graph.ops.outputs\[0\]: tensor 1 is born at 1, not at 0"),
        ("tensors", "freed_at", 1, 8, r"graph.tensors.freed_at\[1\]: 8"),
        ("tensors", "freed_at", 2, 0, r"graph.tensors.freed_at\[2\]: 0 is before the birth"),
        ("saves", "tensor", 0, 5, r"graph.saves.tensor\[0\]: 5"),
        ("saves", "op", 1, 0, r"graph.saves.op\[1\]: 0, but tensor 2 is made by op 1"),
        ("saves", "unpacked_at", 0, [], r"graph.points.id\[5\]"),
        ("saves", "released_at", 1, 3, r"graph.points.id\[4\]: release 1"),
        ("points", "id", 2, 2, r"graph.points.id\[2\]: there is no save 2"),
        ("points", "occurrence", 0, 1, r"graph.points.occurrence\[0\]"),
    ],
)
def test_a_wrong_entry_is_refused_by_field_and_index(table: str, column: str, index: int, value: object, words: str) -> None:
    obj = graph_to_json(two_ops())
    obj[table][column][index] = value
    with pytest.raises(PlanFileError, match=words):
        graph_from_json(obj)


@pytest.mark.parametrize(
    ("table", "column", "value", "words"),
    [
        ("ops", "phase", "ffbx", r"graph.ops.phase\[3\]: 'x' is none of f \(forward\)"),
        ("ops", "phase", "fffu", None),
        ("ops", "phase", "bfff", r"graph.ops.phase\[1\]: forward after backward"),
        ("ops", "recomputable", "1110", r"graph.ops.recomputable\[2\]: a backward op"),
        ("ops", "heavy", "000", "graph.ops.heavy: 3 entries, but the columns beside it have 4"),
        ("ops", "mutates", [[1, 1, 2]], r"graph.ops.mutates\[1\]: tensors 1 and 2 are not of one storage"),
        ("ops", "mutates", [[1, 2]], r"graph.ops.mutates\[0\]: \[1, 2\] is not"),
        ("ops", "mutates", [[0, 1, 2]], r"graph.ops.mutates\[0\]: 1 is not an input"),
        ("tensors", "kind", "paa", "graph.ops.inputs|graph.tensors"),
        ("tensors", "extra", [], r"graph.tensors: missing fields \[\], unknown \['extra'\]"),
        ("saves", "tensor", "12", "graph.saves.tensor: '12' is not a list"),
    ],
)
def test_a_wrong_column_is_refused(table: str, column: str, value: object, words: str | None) -> None:
    obj = graph_to_json(two_ops())
    obj[table][column] = value
    if column == "phase":
        obj["ops"]["recomputable"] = "0000"
    if words is None:
        assert graph_from_json(obj).ops[3].phase == "update"
        return
    with pytest.raises(PlanFileError, match=words):
        graph_from_json(obj)


@pytest.mark.parametrize("obj", [None, [], 3, {}, {"schema": 1}, {"schema": True}])
def test_what_is_no_graph_is_refused(obj: object) -> None:
    with pytest.raises(PlanFileError, match="graph"):
        graph_from_json(obj)
