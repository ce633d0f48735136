"""A plan is carried over to another recording of its step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memopt.graph import Graph
from lightning_memopt.plan import lower, simulate, validate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.carried import Pairing, carried, paired
from lightning_memopt.solvers.rollout import keep_all
from tests.null.graphs import graph_of


@pytest.mark.parametrize("seed", range(12))
def test_to_the_same_step_and_to_one_of_other_sizes(seed: int) -> None:
    """Each plan of a frontier needs no more than it did."""
    graph = graph_of(seed)
    double = replace(graph, tensors=tuple(replace(t, nbytes=2 * t.nbytes) for t in graph.tensors))
    for candidate in planner.solve(graph).candidates:
        same, twice = (carried(Pairing(graph, other), candidate.lives) for other in (graph, double))
        assert same is not None and same == twice
        assert simulate(graph, same).predicted.peak_nbytes <= candidate.predicted.peak_nbytes
        assert simulate(graph, same).predicted.rebuilt_ops == candidate.predicted.rebuilt_ops
        assert validate(graph, same, lower(graph, same)).ok
    assert Pairing(graph, graph).resized == Pairing(graph, graph).others == 0
    assert Pairing(graph, double).resized > 0 and Pairing(graph, double).share == 1


def renamed(graph: Graph, op: int) -> Graph:
    """The step with another kernel for one op, which a second run does not repeat."""
    ops = (*graph.ops[:op], replace(graph.ops[op], name="aten::other", recomputable=False), *graph.ops[op + 1 :])
    return replace(graph, ops=ops)


@pytest.mark.parametrize("seed", range(12))
def test_what_only_one_of_the_steps_has_is_kept(seed: int) -> None:
    graph = graph_of(seed)
    smallest = planner.solve(graph).candidates[0].lives
    for op in range(len(graph.forward)):
        other = renamed(graph, op)
        pairing = Pairing(graph, other)
        assert op not in pairing.ops and len(pairing.ops) == len(graph.forward) - 1
        lives = carried(pairing, smallest)
        if lives is not None:
            assert validate(other, lives, lower(other, lives)).ok
            assert simulate(other, lives).predicted.rebuilt_ops <= simulate(graph, smallest).predicted.rebuilt_ops


def test_nothing_to_carry() -> None:
    graph = graph_of(1)
    assert carried(Pairing(graph, graph), keep_all(graph)) == keep_all(graph)


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("abc", "abc", "aabbcc"),
        ("abcdef", "abxcdef", "aabbccddeeff"),
        ("abxcdef", "abcdef", "aabbccddeeff"),
        ("abxcdef", "abycdef", "aabbccddeeff"),
        ("abc", "", ""),
        ("abc", "xyz", ""),
        ("abcd" * 30, "abcd" * 20, "".join(2 * name for name in "abcd" * 20)),
    ],
)
def test_pairs(one: str, other: str, pairs: str) -> None:
    found = paired(one, other)
    assert "".join(one[i] + other[j] for i, j in found) == pairs
