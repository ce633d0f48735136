"""A schedule, indexed by what the engine meets at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Schedule, Segment, lower
from lightning_memopt.runtime.templates import Templates


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule, indexed by what the engine meets at run time."""

    graph: Graph
    lives: tuple[Life, ...]
    schedule: Schedule = field(init=False)
    templates: Templates = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", lower(self.graph, self.lives))
        object.__setattr__(self, "templates", Templates(len(self.graph.forward)))

    @cached_property
    def names(self) -> list[str]:
        return [op.name for op in self.graph.forward]

    @cached_property
    def inputs(self) -> list[tuple[int, ...]]:
        return [op.inputs for op in self.graph.forward]

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        return [op.outputs for op in self.graph.forward]

    @cached_property
    def drops(self) -> frozenset[int]:
        """Tensors that autograd saves and that the plan neither holds nor leaves alone."""
        held = self.schedule.holds
        return frozenset(life.tensor for life in self.lives if life.how == "replay" and life.tensor not in held)

    @cached_property
    def segments(self) -> dict[tuple[int, int], tuple[int, Segment]]:
        """(save, occurrence) -> (point, steps)."""
        points = self.graph.points
        return {(points[p].id, points[p].occurrence): (p, steps) for p, steps in self.schedule.segments.items()}

    @cached_property
    def frees(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        points = self.graph.points
        frees = ((points[p], tensors) for p, tensors in self.schedule.frees.items() if p < len(points))
        return {(point.kind, point.id, point.occurrence): tensors for point, tensors in frees}

    @cached_property
    def births(self) -> dict[int, tuple[int, ...]]:
        """Point -> the tensors whose replayed lives begin there."""
        found: dict[int, tuple[int, ...]] = {}
        for life in self.lives:
            if life.how == "replay":
                found[life.born_at] = (*found.get(life.born_at, ()), life.tensor)
        return found

    @cached_property
    def saved(self) -> list[int]:
        """The tensor of every save, in packing order."""
        return [save.tensor for save in self.graph.saves]

    @cached_property
    def random(self) -> frozenset[int]:
        """Replayed ops that need the generator's state."""
        return frozenset(op for op in self.schedule.replayed if self.graph.ops[op].state_nbytes)

    @property
    def empty(self) -> bool:
        """Nothing is dropped: the recorder need not run at all."""
        return not self.schedule.segments
