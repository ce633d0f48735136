"""Recorded steps as ordering problems: every allowed sequence meets the same memory, and what the memory allows is allowed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from build import random_step

from benchmarks.papers.olla_steps import step_of
from benchmarks.papers.olla_validate import faults_in_step
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor
from lightning_memopt.solvers.ordering import faults, order


def step(*lines: tuple[str, str, Sequence[int], Sequence[int]], nbytes: dict[int, int], **fields: Any) -> Graph:
    """A graph from (phase, op, inputs, outputs) with tensors of these bytes; those that no op makes are from before the step.

    `fields`: op number, as "op3", -> fields of that op; "overwrites" -> {new tensor: old tensor}.
    """
    overwrites: dict[int, int] = fields.pop("overwrites", {})
    made = {t: i for i, (_, _, _, outputs) in enumerate(lines) for t in outputs}
    last = {t: max(i for i, (_, _, ins, outs) in enumerate(lines) if t in (*ins, *outs)) for t in nbytes}
    ops, storage = [], {t: t for t in nbytes}
    for new, old in overwrites.items():
        storage[new] = storage[old]
    for i, (phase, name, inputs, outputs) in enumerate(lines):
        pairs = tuple((overwrites[t], t) for t in outputs if t in overwrites)
        more = fields.get(f"op{i}", {})
        known: Any = dict(id=i, name=f"aten::{name}", phase=phase, at=i)
        ops.append(Op(**known, inputs=tuple(inputs), outputs=tuple(outputs), mutates=pairs, **more))
    kinds = {t: "activation" if t in made else "parameter" for t in nbytes}
    tensors = tuple(
        Tensor(
            id=t, name=str(t), nbytes=size, kind=kinds[t], storage=storage[t], born_at=made.get(t, BEFORE),  # type: ignore[arg-type]
            freed_at=last[t] if t in made else len(lines),
        )
        for t, size in sorted(nbytes.items())
    )  # fmt: skip
    points = (*(Point("op", i) for i in range(len(ops))), Point("release", 0))
    return Graph(tuple(ops), tensors, (), points)


def allowed(graph: Graph) -> set[tuple[int, ...]]:
    """All sequences that the problem of a step allows."""
    whole = step_of(graph)
    return {tuple(whole.sequence(s)) for s in itertools.permutations(range(len(whole.problem))) if not faults(whole.problem, s)}


def exact(graph: Graph) -> set[tuple[int, ...]]:
    """All sequences in which every op meets the memory of the step."""
    return {s for s in itertools.permutations(range(len(graph.ops))) if not faults_in_step(graph, s)}


CASES = {
    "two branches": step(
        ("forward", "relu", [0], [1]), ("forward", "exp", [0], [2]), ("forward", "add", [1, 2], [3]),
        nbytes={0: 1, 1: 1, 2: 1, 3: 1},
    ),
    "a write waits for the readers, and later readers for it": step(
        ("forward", "exp", [0], [1]), ("forward", "relu", [1], [2]), ("forward", "mul_", [1], [3]),
        ("forward", "abs", [3], [4]), ("forward", "neg", [0], [5]),
        nbytes={0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, overwrites={3: 1},
    ),
    "an update by name alone": step(
        ("forward", "mm", [0, 1], [2]), ("backward", "mm", [2, 1], [3]), ("backward", "mm", [2, 0], [4]),
        ("update", "add_.Tensor", [0, 3], []), ("update", "add_.Tensor", [1, 4], []),
        nbytes={0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    ),
    "into given memory": step(
        ("backward", "exp", [0], [1]), ("backward", "abs", [1], [2]), ("backward", "mm.out", [1, 0], []),
        ("backward", "neg", [1], [3]), nbytes={0: 1, 1: 1, 2: 1, 3: 1},
    ),
    "random ops": step(
        ("forward", "bernoulli", [0], [1]), ("forward", "exp", [0], [2]), ("forward", "bernoulli", [0], [3]),
        nbytes={0: 1, 1: 1, 2: 1, 3: 1}, op0={"state_nbytes": 4}, op2={"state_nbytes": 4},
    ),
    "what Python read": step(
        ("forward", "exp", [0], [1]), ("forward", "abs", [0], [2]), ("forward", "_local_scalar_dense", [1], []),
        ("forward", "neg", [0], [3]), nbytes={0: 1, 1: 1, 2: 1, 3: 1},
    ),
    "running statistics": step(
        ("forward", "native_batch_norm", [0], [1]), ("forward", "exp", [0], [2]), ("forward", "native_batch_norm", [2], [3]),
        nbytes={0: 1, 1: 1, 2: 1, 3: 1}, op0={"scope": "bn#1"}, op2={"scope": "bn#2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_all_sequences_that_keep_the_memory_are_allowed_and_no_others(name: str) -> None:
    assert allowed(CASES[name]) == exact(CASES[name])


def test_a_storage_is_one_buffer_and_views_cost_nothing() -> None:
    graph = step(
        ("forward", "exp", [0], [1]), ("forward", "mul_", [1], [2]), ("forward", "t", [2], []), ("forward", "abs", [0], [3]),
        ("forward", "mm", [2, 3], [4]), nbytes={0: 5, 1: 7, 2: 7, 3: 11, 4: 13}, overwrites={2: 1},
    )  # fmt: skip
    whole = step_of(graph)
    assert whole.groups == ((0,), (1, 2), (3,), (4,))
    assert sorted(whole.problem.nbytes) == [7, 11] and whole.problem.workspace == (0, 0, 0, 13)
    assert whole.problem.resident_nbytes == 5
    assert whole.problem.levels_nbytes(range(4)).tolist() == [12, 12, 23, 36]


def test_a_gradient_is_freed_by_its_update_and_other_results_stay() -> None:
    """Although the step held both to its end."""
    graph = step(
        ("forward", "mm", [0, 1], [2]), ("backward", "mm", [2, 1], [3]), ("update", "add_", [0, 3], []),
        ("backward", "exp", [2], [4]), nbytes={0: 1, 1: 1, 2: 10, 3: 20, 4: 40},
    )  # fmt: skip
    tensors = tuple(replace(t, freed_at=4 if t.id in (3, 4) else t.freed_at) for t in graph.tensors)
    whole = step_of(replace(graph, tensors=tensors))
    problem = whole.problem
    assert whole.updates == {2} and [problem.nbytes[b] for b in problem.stays] == [40]
    assert problem.levels_nbytes(range(4)).tolist() == [12, 32, 32, 52]


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_keep_their_memory(seed: int) -> None:
    graph = random_step(random.Random(seed), 30)
    graph = replace(graph, ops=tuple(replace(op, name=f"aten::{op.name}") for op in graph.ops))
    whole = step_of(graph)
    assert not faults_in_step(graph, whole.sequence(range(len(whole.problem))))
    result = order(whole.problem, seconds=2)
    assert not faults(whole.problem, result.sequence, result.peak_nbytes)
    assert not faults_in_step(graph, whole.sequence(result.sequence))
    assert result.peak_nbytes >= result.bound_nbytes > 0


def test_another_order_that_changes_bytes_is_a_fault() -> None:
    graph = CASES["an update by name alone"]
    assert not faults_in_step(graph, range(5))
    assert faults_in_step(graph, [0, 1, 3, 2, 4]) == ["op 2 (aten::mm) meets other memory than in the step"]
    assert faults_in_step(CASES["random ops"], [2, 1, 0])[-1] == "random ops change places"
    assert faults_in_step(graph, [0, 0, 1, 2, 3])
