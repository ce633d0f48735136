"""The states of an input signature: small objects, one per state."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan
from lightning_memopt.runtime import Program
from lightning_memopt.solvers.planner import Frontier


@dataclass(eq=False)
class Observing:
    """`steps` real steps are to be recorded; `graphs` are those recorded so far. -> Running, Failed."""

    steps: int
    graphs: list[Graph] = field(default_factory=list)
    restarts: int = 0
    evictions: int = 0
    opaque_ops: dict[str, str] = field(default_factory=dict)


class Running:
    """A plan is in force. -> Running (replanned)."""

    def __init__(self, plan: Plan, graph: Graph, frontier: Frontier | None) -> None:
        self.plan = plan
        self.program = Program(graph, plan.lives)
        self.frontier = frontier
        self.measured_bytes: int | None = None
        self.steps = 0
        self.matched = False
        self.deviated = False
        self.replanned = 0


@dataclass(frozen=True, eq=False)
class Failed:
    """The model trains as it is. Final."""

    reason: str


State = Observing | Running | Failed
