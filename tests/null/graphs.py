"""Small graphs written by hand: a list of forward steps in, an observed training step out.

    graph = training_step([
        step("x", reads=["a"], heavy=True, saves=["a"], nbytes=8),
        step("y", reads=["x"], saves=["y"], nbytes=8),
    ], inputs={"a": 8})

Each step is one op. Backward comes in reverse order: autograd asks for what the step saved, the gradient op runs, the
saves are released. Names that are neither made by a step nor in `inputs` are parameters of zero bytes.
`names(graph)` finds tensors and ops again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Save, Tensor
from lightning_memopt.plan import Life, Rebuild, lower


@dataclass(frozen=True, kw_only=True)
class Step:
    """A forward op. `overwrites` names a tensor of which it makes the next version, in the same storage."""

    name: str
    nbytes: int = 1
    reads: Sequence[str] = ()
    saves: Sequence[str] = ()
    overwrites: str | None = None
    heavy: bool = False
    recomputable: bool = True
    seconds: float = 1.0
    state_nbytes: int = 0
    workspace_nbytes: int = 0


def step(name: str, **fields: Any) -> Step:
    """A light op `name` that makes the tensor `name`; fields of `Step`."""
    return Step(name=name, **fields)


def training_step(steps: Sequence[Step], inputs: Mapping[str, int] | None = None, gradients: bool = True) -> Graph:
    """The graph of one step: forward in order, backward in reverse.

    User code lets go of a tensor after the last forward op that reads it (the last step's result: after its backward).
    `gradients`: backward ops make gradients as large as what they belong to, which live until their maker's backward.
    """
    tensors: dict[str, Tensor] = {}
    ops: list[Op] = []
    saves: list[Save] = []
    points: list[Point] = []

    def make(name: str, nbytes: int, born_at: int, storage: int | None = None, kind: str = "activation") -> int:
        id = len(tensors)
        tensors[name] = Tensor(
            id=id,
            name=name,
            nbytes=nbytes,
            kind=kind,  # type: ignore[arg-type]
            storage=id if storage is None else storage,
            born_at=born_at,
            freed_at=born_at,
        )
        return id

    def run(**fields: Any) -> None:
        ops.append(Op(id=len(ops), at=len(points), **fields))
        points.append(Point("op", len(ops) - 1))

    def used(name: str) -> None:
        tensors[name] = replace(tensors[name], freed_at=len(points))

    made = {s.name for s in steps}
    sizes = {n: 0 for s in steps for n in [*s.reads, *s.saves] if n not in made} | dict(inputs or {})
    for name, nbytes in sizes.items():
        make(name, nbytes, BEFORE, kind="input" if name in (inputs or {}) else "parameter")
    for s in steps:
        reads = [*s.reads, *([s.overwrites] if s.overwrites and s.overwrites not in s.reads else [])]
        for name in reads:
            used(name)
        old = tensors[s.overwrites] if s.overwrites else None
        if old:  # the new version is there from this op on, in the same memory
            tensors[old.name] = replace(old, freed_at=len(points) - 1)
        new = make(s.name, s.nbytes, len(points), old.storage if old else None)
        for name in s.saves:
            saves.append(Save(id=len(saves), tensor=tensors[name].id, op=len(ops), unpacked_at=(), released_at=0))
        run(
            name=s.name,
            phase="forward",
            inputs=tuple(tensors[n].id for n in reads),
            outputs=(new,),
            mutates=((old.id, new),) if old else (),
            seconds=s.seconds,
            workspace_nbytes=s.workspace_nbytes,
            heavy=s.heavy,
            recomputable=s.recomputable,
            state_nbytes=s.state_nbytes,
        )
    used(steps[-1].name)
    packed: dict[int, list[Save]] = {}
    for save in saves:
        packed.setdefault(save.op, []).append(save)
    for index in reversed(range(len(steps))):
        s = steps[index]
        mine = packed.get(index, [])
        for save in mine:
            saves[save.id] = replace(save, unpacked_at=(len(points),))
            points.append(Point("unpack", save.id))
        own = f"grad {s.name}"
        if own in tensors:
            used(own)
        wanted = [n for n in dict.fromkeys(s.reads) if gradients and n in made and f"grad {n}" not in tensors]
        outputs = tuple(make(f"grad {n}", tensors[n].nbytes, len(points), kind="gradient") for n in wanted)
        read = dict.fromkeys(tensors[n].id for n in [*s.saves, own] if n in tensors)
        run(name=f"backward {s.name}", phase="backward", inputs=tuple(read), outputs=outputs)
        for save in mine:
            saves[save.id] = replace(saves[save.id], released_at=len(points))
            points.append(Point("release", save.id))
    for name in sizes:
        used(name)
    last = len(points) - 1
    found = tuple(replace(t, freed_at=min(t.freed_at, last)) for t in tensors.values())
    return Graph(
        ops=tuple(ops), tensors=found, saves=tuple(saves), points=tuple(points), step_seconds=sum(op.seconds for op in ops)
    )


def names(graph: Graph) -> dict[str, int]:
    """Tensor name -> id."""
    return {t.name: t.id for t in graph.tensors}


def held_nbytes(graph: Graph, lives: Iterable[Life]) -> int:
    """Bytes of forward tensors that the lives hold from forward to backward."""
    return sum(graph.tensors[life.tensor].nbytes for life in lives if life.how == "original")


def rebuilt(graph: Graph, lives: Iterable[Life]) -> list[str]:
    """Names of the ops that run again, in the order in which they do."""
    segments = lower(graph, lives).segments
    return [graph.ops[s.op].name for p in sorted(segments) for s in segments[p] if isinstance(s, Rebuild)]


def random_steps(rng: random.Random, count: int) -> list[Step]:
    """Heavy, light, random, opaque and in-place steps that read recent tensors; in-place ones as autograd permits."""
    steps: list[Step] = []
    for i in range(count):
        recent = [s.name for s in steps[-5:]] or ["input"]
        gone = {s.overwrites for s in steps}
        reads = [r for r in rng.sample(recent, min(len(recent), rng.randint(1, 3))) if r not in gone] or ["input"]
        name, kind = f"t{i}", rng.random()
        saved = {n for s in steps for n in s.saves}
        fresh = [r for r in reads if r not in saved and r != "input"]
        if kind < 0.12 and fresh:
            size = next(s.nbytes for s in steps if s.name == fresh[0])
            steps.append(
                step(
                    name,
                    reads=reads,
                    overwrites=fresh[0],
                    nbytes=size,
                    seconds=rng.random(),
                    saves=[name] if rng.random() < 0.5 else [],
                )
            )
            continue
        saves = [n for n in [name, *reads] if rng.random() < 0.5]
        steps.append(
            step(
                name,
                reads=reads,
                saves=saves,
                nbytes=rng.randint(1, 64),
                seconds=rng.random(),
                heavy=kind > 0.75,
                recomputable=kind < 0.93,
                workspace_nbytes=rng.randint(0, 20),
                state_nbytes=5 if 0.12 <= kind < 0.22 else 0,
            )
        )
    return steps


def lstm_steps(count: int, nbytes: int = 1 << 16) -> list[Step]:
    """At least `count` forward steps: an LSTM of four layers with attention over a shared tensor (Echo, figs 1, 2)."""
    steps = [step("keys", reads=["input", "w"], saves=["input"], nbytes=16 * nbytes, heavy=True, seconds=1e-3)]
    layers = 4
    hidden, cell = [["input"] * layers for _ in range(2)]
    t = 0
    while len(steps) < count:
        below = "input"
        for k in range(layers):
            at = f"{t}.{k}"
            steps.append(
                step(
                    f"z{at}",
                    reads=[below, hidden[k], "w"],
                    saves=[below, hidden[k]],
                    nbytes=4 * nbytes,
                    heavy=True,
                    seconds=4e-4,
                )
            )
            for gate in "ifog":
                steps.append(step(f"{gate}{at}", reads=[f"z{at}"], saves=[f"{gate}{at}"], nbytes=nbytes, seconds=2e-5))
            for name, one, other in (("p", "f" + at, cell[k]), ("q", "i" + at, "g" + at)):
                steps.append(step(name + at, reads=[one, other], saves=[one, other], nbytes=nbytes, seconds=2e-5))
            steps.append(step(f"c{at}", reads=["p" + at, "q" + at], nbytes=nbytes, seconds=2e-5))
            steps.append(step(f"y{at}", reads=["c" + at], saves=["y" + at], nbytes=nbytes, seconds=2e-5))
            both = ["o" + at, "y" + at]
            steps.append(step(f"h{at}", reads=both, saves=both, nbytes=nbytes, seconds=2e-5))
            below = hidden[k] = f"h{at}"
            cell[k] = f"c{at}"
        steps.append(step(f"a{t}", reads=["keys", below], nbytes=16 * nbytes, seconds=1e-4))
        steps.append(step(f"b{t}", reads=[f"a{t}"], saves=[f"b{t}"], nbytes=16 * nbytes, seconds=1e-4))
        steps.append(step(f"s{t}", reads=[f"b{t}"], saves=[f"b{t}"], nbytes=nbytes // 16, heavy=True, seconds=2e-4))
        t += 1
    return steps


def graph_of(seed: int, steps: int = 14) -> Graph:
    """A random step with tensors of up to 4 MiB: a plan must save more than the margin that it leaves."""
    graph = training_step(random_steps(random.Random(seed), steps))
    return replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 16) for t in graph.tensors))
