"""The ordering problem of a recorded step.

Precedence: an op runs after the op that last wrote a storage that it reads, and a write runs after all reads of what it
overwrites. In forward, the recorder notes writes as new storage versions. In backward and updates it notes only the names of
ops: an op whose name says that it works in place (`add_`) writes to its first input, and one that works on lists or into given
memory (`_foreach_add_`, `mm.out`) writes to all inputs. These keep their order: ops that draw random numbers, ops about which
only the name is known, the normalisations of one layer (because of their running statistics), and whatever ran after a value
that Python read (`item`). Gradients are added up in the order of the step, because each addition reads the sum so far.

Buffers: one for each storage. It is allocated by the op that makes its first version and freed after the last op that reads or
writes it, as compiled code does; eager Python may hold it for longer. A gradient that an update reads is freed by that update.
Ops that make and write nothing (views) run right after the op that made what they read: they cost no memory there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_memopt.graph import BEFORE, Graph, Op
from lightning_memopt.solvers.ordering import Problem

_KNOWN = ("aten", "prims", "profiler")
_HOST = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip
"""Ops whose values, or sizes of results, Python may read, so that every later op may depend on them."""

_RANDOM = re.compile(r"(native_dropout|bernoulli|multinomial|poisson|rand|randn|randint|normal|uniform|exponential)_?")
"""Random ops of compiled regions, whose graphs do not say that they read a generator. Inductor's own have seeds."""


@dataclass(frozen=True, eq=False)
class Step:
    """A recorded step as a problem.

    graph: the step.
    problem: its ops; views are parts of other ops.
    updates: the ops of the problem that update parameters.
    first: ops of the graph that run before all others.
    groups: op of the problem -> the ops of the graph that it stands for, in their order.
    """

    graph: Graph
    problem: Problem
    updates: frozenset[int]
    first: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def sequence(self, order: Sequence[int]) -> list[int]:
        """Ids of all ops of the graph, from a sequence of the problem."""
        return [*self.first, *(op for group in order for op in self.groups[group])]


@dataclass
class _Storage:
    """What is known about a storage while the ops are read in their order.

    maker: the op of the problem that allocated it; BEFORE.
    writer: the op that wrote it last; BEFORE.
    readers: ops that read it since.
    users: all of them.
    """

    nbytes: int
    maker: int = BEFORE
    writer: int = BEFORE
    readers: list[int] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    made: bool = False
    freed_at: int = BEFORE


class _Reading:
    """Reads the ops of a graph in their order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storages: dict[int, _Storage] = {}
        for t in graph.tensors:
            known = self.storages.setdefault(t.storage, _Storage(t.nbytes))
            known.nbytes = max(known.nbytes, t.nbytes)
            known.freed_at = max(known.freed_at, t.freed_at, graph.saved_until(t.id))
            known.made |= t.born_at == BEFORE
        self.before: list[set[int]] = []
        self.groups: list[list[int]] = []
        self.first: list[int] = []
        self.host: int | None = None
        self.chains: dict[str, int] = {}
        for op in graph.ops:
            self._read(op)

    def _storage(self, tensor: int) -> int:
        return self.graph.tensors[tensor].storage

    def _read(self, op: Op) -> None:
        reads = dict.fromkeys(map(self._storage, op.inputs))
        makes = dict.fromkeys(map(self._storage, op.outputs))
        writes = dict.fromkeys(map(self._storage, _written(op)))
        chains = _chains(op)
        if not makes and not writes and not chains and not op.workspace_nbytes and len(reads) <= 1 and _base(op) not in _HOST:
            writer = max((self.storages[s].writer for s in reads), default=len(self.groups) - 1)
            (self.groups[writer] if writer != BEFORE else self.first).append(op.id)
            return
        me = len(self.groups)
        self.groups.append([op.id])
        before = set() if self.host is None else {self.host}
        for s in reads:
            storage = self.storages[s]
            before.add(storage.writer)
            storage.readers.append(me)
            storage.users.add(me)
        for s in (*makes, *writes):
            storage = self.storages[s]
            if not storage.made:
                storage.maker, storage.made = me, True
            before.update(storage.readers, [storage.writer])
            storage.writer, storage.readers = me, []
            storage.users.add(me)
        for chain in chains:
            before.add(self.chains.get(chain, BEFORE))
            self.chains[chain] = me
        if _base(op) in _HOST:
            self.host = me
        self.before.append(before - {me, BEFORE})


def step_of(graph: Graph) -> Step:
    """The problem of a step."""
    reading = _Reading(graph)
    of_point = [graph.ops[group[0]].at for group in reading.groups]
    updates = frozenset(i for i, group in enumerate(reading.groups) if graph.ops[group[0]].phase == "update")
    backward = {i for i, group in enumerate(reading.groups) if graph.ops[group[0]].phase == "backward"}
    last = len(graph.points) - 1
    resident = 0
    makers: list[int] = []
    users: list[tuple[int, ...]] = []
    sizes: list[int] = []
    stays: set[int] = set()
    workspace = [max((graph.ops[o].workspace_nbytes for o in group), default=0) for group in reading.groups]
    windows = [(t.nbytes, window) for t in graph.tensors for window in t.windows]
    windowed = {t.storage for t in graph.tensors if t.windows}
    for id, storage in reading.storages.items():
        if not storage.nbytes or id in windowed:
            continue
        born_at = graph.tensors[id].born_at
        if not storage.made:  # no op made it: memory that the recorder does not see, allocated between the ops at these points
            windows.append((storage.nbytes, (born_at, storage.freed_at)))
            continue
        read_by_update = bool(storage.users & updates)
        released = storage.freed_at < last or (storage.maker in backward and read_by_update)
        if storage.maker == BEFORE and not released:
            resident += storage.nbytes
            continue
        needed = set(storage.users)
        if storage.maker == BEFORE and not needed:
            needed = {min(max(bisect_right(of_point, storage.freed_at) - 1, 0), len(of_point) - 1)}
        needed.discard(storage.maker)
        if not needed and released:
            workspace[storage.maker] += storage.nbytes
            continue
        if not released:
            stays.add(len(makers))
        makers.append(storage.maker)
        users.append(tuple(sorted(needed)))
        sizes.append(storage.nbytes)
    for nbytes, (begins, ends) in windows:
        maker, user = bisect_left(of_point, begins), bisect_right(of_point, ends) - 1
        if maker > user:
            continue  # between two ops: autograd passes a tensor on
        makers.append(maker)
        users.append((user,))
        sizes.append(nbytes)
        if user != maker:
            reading.before[user].add(maker)
    problem = Problem(
        before=tuple(tuple(sorted(ops)) for ops in reading.before),
        makers=tuple(makers),
        users=tuple(users),
        nbytes=tuple(sizes),
        workspace=tuple(workspace),
        stays=frozenset(stays),
        resident_nbytes=resident,
    )
    return Step(graph, problem, updates, tuple(reading.first), tuple(map(tuple, reading.groups)))


def _parts(op: Op) -> tuple[str, str, str]:
    """`"aten::add_.Tensor"`, and `"aten.add_.Tensor"` of a compiled region, -> `("aten", "add_", "Tensor")`."""
    namespace, base, overload, *_ = [*re.split(r"::|\.", op.name, maxsplit=2), "", ""]
    return namespace, base, overload


def _base(op: Op) -> str:
    return _parts(op)[1]


def _written(op: Op) -> tuple[int, ...]:
    """The inputs that an op writes to in place."""
    _, base, overload = _parts(op)
    if base.endswith("_"):
        return op.inputs if base.startswith("_") else op.inputs[:1]
    if op.phase != "forward" and overload.endswith("out"):
        return op.inputs
    return tuple(old for old, _ in op.mutates)


def _chains(op: Op) -> list[str]:
    """Names of the groups of ops within which this op keeps its place in the order."""
    chains = []
    namespace, base, _ = _parts(op)
    if op.state_nbytes or (namespace == "aten" and _RANDOM.fullmatch(base)):
        chains.append("random")
    if namespace not in _KNOWN:
        chains.append("unknown")
    if "batch_norm" in base and op.phase == "forward":
        chains.append(f"norm {op.scope.partition('#')[0]}")
    return chains
