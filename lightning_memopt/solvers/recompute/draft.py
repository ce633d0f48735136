"""A plan that is changed a few tensors at a time, and what each change costs.

To price a plan, `plan.simulate` walks the whole step. A change of a tensor touches a few segments: those in which it is made
or read. A `Draft` lowers only these again, and adds the differences to the bytes at every point. Prices are those of the
simulator (tests/solvers/test_local_search.py compares them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import Graph, Levels, Op
from lightning_memopt.plan import (
    Life,
    LoweringError,
    Rebuild,
    Segment,
    SegmentCost,
    added_by,
    fixed_levels,
    lower,
    segment_cost,
)
from lightning_memopt.plan.lower import Residency, segment
from lightning_memopt.solvers.rollout import Rollout

Lives = tuple[Life, ...]


@dataclass(frozen=True, eq=False)
class Change:
    """Other lives for some tensors, and the plan that results.

    lives: tensor -> its new lives.
    segments: point -> its segment, for points whose segment changes; empty if nothing runs there any more.
    nbytes: bytes at every point, as in `Timeline.nbytes`.
    extra_seconds: how many seconds longer the ops that run again take than before; negative if they take less.
    """

    lives: dict[int, tuple[Life, ...]]
    segments: dict[int, Segment]
    nbytes: np.ndarray
    extra_seconds: float

    @property
    def peak_nbytes(self) -> int:
        return int(self.nbytes.max())


class Draft:
    """A plan that only rebuilds, open to changes.

    graph: the graph.
    lives: all lives, as in a plan.
    lives_of: tensor -> its lives, in their order.
    segments: unpack point -> what runs there.
    nbytes: bytes at every point.
    """

    def __init__(self, graph: Graph, lives: Iterable[Life]) -> None:
        self.graph = graph
        self.lives = lives = tuple(lives)
        self._holds_states = kind_of(graph.device).is_host
        self._resident = Residency(graph, lives)
        self.lives_of = self._resident.lives
        self.segments = dict(lower(graph, lives).segments)
        self._births: dict[int, set[int]] = {}
        self._costs = {point: segment_cost(graph, steps) for point, steps in self.segments.items()}
        self._touching: dict[int, set[int]] = {}
        levels = Levels(len(graph.points))
        self._runs: Counter[int] = Counter()
        for life in lives:
            levels.add(*added_by(graph, life))
            if life.how == "rebuild":
                self._births.setdefault(life.born_at, set()).add(life.tensor)
        for point, steps in self.segments.items():
            for op in self.ops(steps):
                for t in (*op.inputs, *op.outputs):
                    self._touching.setdefault(t, set()).add(point)
            self._runs.update(self._with_state(steps))
        self._level = np.array(fixed_levels(graph), dtype=np.int64) + np.array(levels.levels(), dtype=np.int64)
        for id in self._runs:
            self._add_state(self._level, id, 1)
        self.nbytes = self._level.copy()
        for point in self.segments:
            self.nbytes[point] += self._above(self._costs[point], self._births.get(point, set()))

    @property
    def peak_nbytes(self) -> int:
        return int(self.nbytes.max())

    @property
    def seconds(self) -> float:
        """Seconds of the ops that run again."""
        return sum(cost.seconds for cost in self._costs.values())

    @property
    def peak_at(self) -> int:
        return int(self.nbytes.argmax())

    @property
    def runs(self) -> int:
        """How many ops run again."""
        return sum(map(len, self.segments.values()))

    def ops(self, steps: Segment) -> list[Op]:
        """The ops of a segment."""
        return [self.graph.ops[step.op] for step in steps if isinstance(step, Rebuild)]

    def segments_of(self, tensor: int) -> set[int]:
        """The points of the segments whose ops read or make a tensor."""
        return self._touching.get(tensor, set())

    def resident(self, tensor: int, point: int) -> bool:
        """Whether a rebuild at a point may start from the tensor."""
        return self._resident(tensor, point)

    def change(self, lives: Mapping[int, Iterable[Life]]) -> Change | None:
        """The change that gives these tensors other lives. None if one of these lives could not begin."""
        after = {t: tuple(other) for t, other in lives.items()}
        before = {t: self.lives_of.get(t, []) for t in after}
        touched = {t: {p: self._resident(t, p) for p in self.segments_of(t)} for t in after}
        births: dict[int, set[int]] = {}

        def begins(t: int, point: int, born: bool) -> None:
            at = births.setdefault(point, set(self._births.get(point, ())))
            (at.add if born else at.discard)(t)

        segments: dict[int, Segment] = {}
        self.lives_of.update((t, list(other)) for t, other in after.items())
        try:
            for t, there in touched.items():
                born = {life.born_at for life in after[t] if life.how == "rebuild"}
                unborn = {life.born_at for life in before[t] if life.how == "rebuild"} - born
                for point in born | unborn | {p for p, was in there.items() if self._resident(t, p) != was}:
                    begins(t, point, point in born)
            for point, made in births.items():
                segments[point] = segment(self.graph, point, made, self._resident) if made else ()
        except LoweringError:
            return None
        finally:
            self.lives_of.update(before)
        return self._priced(after, segments, births)

    def after(self, change: Change) -> Draft:
        """The plan with a change, in which all lives end with their last read. Raises LoweringError."""
        roll = Rollout(self.graph)
        for point, steps in (self.segments | change.segments).items():
            roll.run(point, (op.id for op in self.ops(steps)))
        return Draft(self.graph, roll.lives())

    def _priced(self, after: dict[int, tuple[Life, ...]], segments: dict[int, Segment], births: dict[int, set[int]]) -> Change:
        """`births`: point of a segment -> the tensors that it makes for lives."""
        level = self._level.copy()
        for t, lives in after.items():
            for life in self.lives_of.get(t, ()):
                self._add(level, life, -1)
            for life in lives:
                self._add(level, life, 1)
        runs = Counter[int]()
        seconds = 0.0
        costs = {point: segment_cost(self.graph, steps) for point, steps in segments.items()}
        for point, steps in segments.items():
            runs.update(self._with_state(steps))
            runs.subtract(self._with_state(self.segments.get(point, ())))
            seconds += costs[point].seconds
            if point in self._costs:
                seconds -= self._costs[point].seconds
        for op, more in runs.items():
            self._add_state(level, op, (self._runs[op] + more > 0) - (self._runs[op] > 0))
        nbytes = level + (self.nbytes - self._level)
        for point, cost in costs.items():
            nbytes[point] = level[point] + self._above(cost, births[point])
        return Change(after, segments, nbytes, seconds)

    def _above(self, cost: SegmentCost, births: set[int]) -> int:
        """Bytes that a segment takes while it runs, in addition to the lives at its point."""
        return max(0, cost.rise_nbytes - sum(self.graph.tensors[t].nbytes for t in births))

    def _with_state(self, steps: Segment) -> list[int]:
        """The ops of a segment for which the device keeps a generator's state (`plan.simulate.states`)."""
        return [op.id for op in self.ops(steps) if op.state_nbytes] if self._holds_states else []

    def _add(self, level: np.ndarray, life: Life, times: int) -> None:
        first, last, nbytes = added_by(self.graph, life)
        level[max(first, 0) : last + 1] += times * nbytes

    def _add_state(self, level: np.ndarray, op_id: int, times: int) -> None:
        op = self.graph.ops[op_id]
        level[op.at : self.graph.last_release + 1] += times * op.state_nbytes
