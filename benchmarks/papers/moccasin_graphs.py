"""Graphs of Moccasin (Bartan et al., ICML 2023), its model of a schedule, and the same as a step of ours.

Its model: ops have one output each and run one at a time. They run for the first time in a given order, and any op may run
again at any time. A reader takes the newest instance of what it reads. An instance is in memory from its own run to its
last reader, both included. The peak is the most bytes at once, the duration the sum of all runs (`Dag.measure`).

As a step of ours (`Dag.step`): all ops are of the forward. Each edge is a save that is asked for right before its reader
and released right after it. So the rebuilds before a reader are what Moccasin calls a stage, and every op may be rebuilt in
it, be it of the network's forward or its backward. User code holds nothing longer than its own op.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memopt.graph import Graph, Op, Point, Save, Tensor
from lightning_memopt.plan import Life, Rebuild, lower

SECONDS = 100.0
"""Of a step in its input order."""
UNIT_NBYTES = 1 << 13
"""Number of bytes that one unit of size counts as, if sizes are small: budgets here leave some bytes free for unseen memory,
and those must be less than a unit.
"""


@dataclass(frozen=True, kw_only=True)
class Dag:
    """A graph in its input order.

    name: of the graph.
    nbytes, durations: of each op's output and run, in its own units.
    reads: the ops whose outputs each op reads, rising.
    """

    name: str
    nbytes: tuple[int, ...]
    durations: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def floor(self) -> int:
        """No schedule has a lower peak: the most that one op reads and makes."""
        return max(self.nbytes[v] + sum(self.nbytes[u] for u in reads) for v, reads in enumerate(self.reads))

    @property
    def scale(self) -> int:
        """Bytes of a step of ours for one unit of the graph."""
        return 1 if math.gcd(*self.nbytes) >= UNIT_NBYTES else UNIT_NBYTES

    def measure(self, schedule: Sequence[int]) -> tuple[int, int]:
        """Peak and duration of a schedule. Raises ValueError where an op runs before what it reads, or never."""
        if set(schedule) != set(range(len(self))):
            raise ValueError("some op never runs, or is not of the graph")
        newest: dict[int, int] = {}
        last_use = list(range(len(schedule)))
        for i, v in enumerate(schedule):
            for u in self.reads[v]:
                if u not in newest:
                    raise ValueError(f"op {v} runs before op {u}, which it reads")
                last_use[newest[u]] = i
            newest[v] = i
        change = [0] * (len(schedule) + 1)
        for i, v in enumerate(schedule):
            change[i] += self.nbytes[v]
            change[last_use[i] + 1] -= self.nbytes[v]
        level = peak = 0
        for step in change:
            level += step
            peak = max(peak, level)
        return peak, sum(self.durations[v] for v in schedule)

    def step(self) -> Graph:
        """The graph as a step of ours, whose ops take `SECONDS`."""
        whole = sum(self.durations) or 1
        scale = self.scale
        points, saves = [Point("op", 0)], list[Save]()
        ops = [Op(id=0, name="begin", phase="forward", inputs=(), outputs=(0,))]
        tensors = [Tensor(id=0, name="begin", nbytes=0, kind="activation", storage=0, born_at=0, freed_at=0)]

        def asked(tensors: Iterable[int]) -> list[tuple[int, int, int]]:
            """Ask for tensors: (tensor, save, point) of each."""
            found = []
            for t in tensors:
                found.append((t, len(saves) + len(found), len(points)))
                points.append(Point("unpack", found[-1][1]))
            return found

        def release(requests: Iterable[tuple[int, int, int]]) -> None:
            for t, save, at in requests:
                saves.append(Save(id=save, tensor=t, op=t, unpacked_at=(at,), released_at=len(points)))
                points.append(Point("release", save))

        for v, reads in enumerate(self.reads):
            inputs, out = tuple(u + 1 for u in reads), v + 1
            requests = asked(inputs)
            begin = [(0, len(saves) + len(requests), len(points))] if reads else []
            points += [Point("unpack", save) for _, save, _ in begin]
            at = len(points) + len(begin)
            points += [*(Point("release", save) for _, save, _ in begin), Point("op", out)]
            seconds = self.durations[v] / whole * SECONDS
            op = Op(
                id=out,
                name=f"op {v}",
                phase="forward",
                inputs=inputs,
                outputs=(out,),
                seconds=seconds,
                recomputable=True,
                at=at,
            )
            ops.append(op)
            nbytes = self.nbytes[v] * scale
            tensors.append(Tensor(id=out, name=op.name, nbytes=nbytes, kind="activation", storage=out, born_at=at, freed_at=at))
            release(requests)
            saves += [Save(id=save, tensor=t, op=t, unpacked_at=(asked,), released_at=asked + 1) for t, save, asked in begin]
        return Graph(ops=tuple(ops), tensors=tuple(tensors), saves=tuple(saves), points=tuple(points), step_seconds=SECONDS)

    def schedule(self, step: Graph, lives: Iterable[Life]) -> list[int]:
        """The runs of a plan for the step, in order."""
        segments = lower(step, lives).segments
        runs = []
        for at, point in enumerate(step.points):
            if point.kind == "op":
                runs.append(point.id)
            runs += [action.op for action in segments.get(at, ()) if isinstance(action, Rebuild)]
        return [op - 1 for op in runs if op]


def read(path: Path) -> Dag:
    """A graph from a file of Moccasin's: node-link JSON of networkx, in one of the two forms that its files have."""
    data = json.loads(path.read_text())
    nodes: list[dict[str, Any]] = data["nodes"]
    layered = "order" in data["graph"]
    ids = [node.get("id", at) for at, node in enumerate(nodes)]
    ends = ("0", "1") if layered else ("source", "target")
    edges = [(link[ends[0]], link[ends[1]]) for link in data["links"]]
    order = data["graph"]["order"] if layered else _topological(ids, edges)
    place = {id: at for at, id in enumerate(order)}
    reads: list[set[int]] = [set() for _ in ids]
    for u, v in edges:
        reads[place[v]].add(place[u])
    node_of = dict(zip(ids, nodes, strict=True))
    size, time = ("out_cost", "duration") if layered else ("cost_ram", "cost_cpu")
    return Dag(
        name=data["graph"]["name"],
        nbytes=tuple(node_of[id][size] for id in order),
        durations=tuple(node_of[id][time] for id in order),
        reads=tuple(tuple(sorted(r)) for r in reads),
    )


def _topological(ids: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """The order of `networkx.topological_sort`, which Moccasin takes where a file has none: one generation after the other."""
    readers: dict[int, list[int]] = {id: [] for id in ids}
    missing = dict.fromkeys(ids, 0)
    for u, v in edges:
        readers[u].append(v)
        missing[v] += 1
    generation = [id for id in ids if not missing[id]]
    order = []
    while generation:
        following = []
        for id in generation:
            order.append(id)
            for v in readers[id]:
                missing[v] -= 1
                if not missing[v]:
                    following.append(v)
        generation = following
    return order
