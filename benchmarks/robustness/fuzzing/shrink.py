"""Make a case that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from benchmarks.robustness.fuzzing.case import Case, Departure, Step
from benchmarks.robustness.fuzzing.loop import Loop

T = TypeVar("T")
C = TypeVar("C", Case, Loop)
_SIMPLEST = {"optimizer": "sgd", "away": False, "early": False, "autocast": False, "shared": False, "held": 0.0, "observed": 1}
_SIMPLEST_LOOP = {"optimizer": "sgd", "every": 1, "steps": 8, "observed": 1, "share": 1.0, "rows": 256}
_SIMPLER_NODES: tuple[dict[str, Any], ...] = ({"op": "tanh", "k": 0}, {"a": 0}, {"b": 0}, {"k": 0})


def shrunk(case: C, fails: Callable[[C], bool], stop: Callable[[], bool] = lambda: False) -> C:
    """The smallest case that `fails`, found greedily; as far as it is when `stop` says so."""
    again = True
    while again and not stop():
        again = False
        for smaller in _smaller(case):
            if stop():
                break
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: C) -> Iterator[C]:
    """Cases that are simpler in one respect, the largest cuts first."""
    return _smaller_loops(case) if isinstance(case, Loop) else _smaller_programs(case)


def _smaller_programs(case: Case) -> Iterator[Case]:
    for steps in _cuts(case.steps):
        if steps:
            yield dataclasses.replace(case, steps=steps)
    for at, count in _spans(len(case.nodes)):
        yield _without_nodes(case, at, count)
    yield from _simplest(case, _SIMPLEST)
    for i, step in enumerate(case.steps):
        for simpler in _simpler(step):
            yield dataclasses.replace(case, steps=(*case.steps[:i], simpler, *case.steps[i + 1 :]))
    yield from _simpler_nodes(case)


def _smaller_loops(loop: Loop) -> Iterator[Loop]:
    for features in _cuts(loop.features):
        yield dataclasses.replace(loop, features=features)
    for nodes in _cuts(loop.nodes):
        yield dataclasses.replace(loop, nodes=nodes)
    yield from _simplest(loop, _SIMPLEST_LOOP)
    yield from _simpler_nodes(loop)


def _simplest(case: C, values: dict[str, Any]) -> Iterator[C]:
    for name, value in values.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})


def _simpler_nodes(case: C) -> Iterator[C]:
    for i, node in enumerate(case.nodes):
        for change in _SIMPLER_NODES:
            if any(getattr(node, name) != value for name, value in change.items()):
                nodes = (*case.nodes[:i], dataclasses.replace(node, **change), *case.nodes[i + 1 :])
                yield dataclasses.replace(case, nodes=nodes)


def _spans(count: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of all pieces to take out: halves, quarters, ... single ones."""
    size = (count + 1) // 2
    while size:
        yield from ((at, size) for at in range(0, count - size + 1, size))
        size //= 2


def _cuts(values: Sequence[T]) -> Iterator[tuple[T, ...]]:
    for at, size in _spans(len(values)):
        yield (*values[:at], *values[at + size :])


def _without_nodes(case: Case, at: int, count: int) -> Case:
    """The departures of later nodes move with them."""

    def moved(departures: tuple[Departure, ...]) -> Iterator[Departure]:
        for departure in departures:
            if departure.node < at:
                yield departure
            elif departure.node >= at + count:
                yield dataclasses.replace(departure, node=departure.node - count)

    steps = tuple(dataclasses.replace(step, during=tuple(moved(step.during))) for step in case.steps)
    return dataclasses.replace(case, nodes=case.nodes[:at] + case.nodes[at + count :], steps=steps)


def _simpler(step: Step) -> Iterator[Step]:
    plain: dict[str, Any] = {"backward": "once", "before": (), "during": (), "after": ()}
    for name, value in plain.items():
        if getattr(step, name) != value:
            yield dataclasses.replace(step, **{name: value})
    if step.rows != 8:
        yield dataclasses.replace(step, rows=8)
    for name in ("before", "during", "after"):
        values = getattr(step, name)
        if len(values) > 1:
            for fewer in _cuts(values):
                yield dataclasses.replace(step, **{name: fewer})
