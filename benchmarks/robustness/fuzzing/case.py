"""A case of the fuzzer as data: a random program, its steps, what departs in them, and the plan. JSON says all of it."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.robustness.fuzzing.ops import OPS

BACKWARDS = ("once", "once", "once", "retained", "parts", "double", "thread", "grad", "none")
DURING = (
    "skip",
    "extra",
    "other",
    "data",
    "hold",
    "numpy",
    "in place",
    "no grad",
    "draw",
    "flags",
    "collect",
    "raise",
    "seed",
    "copy",
    "save",
    "inner",
    "resize",
)
AFTER = ("input", "buffer", "buffer data", "refill", "weight", "draw", "save", "copy")
BEFORE = ("evaluate", "rate", "average", "load", "freeze", "unfreeze", "forward", "zero", "accumulate", "refill", "collect")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adadelta")


@dataclass(frozen=True)
class Node:
    """One op of the program: `op` on the values `a` and `b`, each counted modulo the values there are. `k` varies the op."""

    op: str
    a: int
    b: int
    k: int


@dataclass(frozen=True)
class Departure:
    """What is done at a node of one forward that the observed forwards did not do."""

    node: int
    what: str
    k: int


@dataclass(frozen=True)
class Step:
    """One step: `rows` of the batch, what comes before the forward, at its nodes, between forward and backward, and how
    backward runs.
    """

    rows: int
    backward: str = "once"
    before: tuple[str, ...] = ()
    during: tuple[Departure, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """See the module. `held`, `plan`: share of tensors that the random plan holds, and its seed. `away`: whether tensors go to
    a disk. `early`: updates in backward where they are exact. `observed`: steps at the beginning that depart in nothing.
    """

    seed: int
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...]
    optimizer: str = "sgd"
    plan: int = 0
    held: float = 0.2
    away: bool = False
    early: bool = False
    autocast: bool = False
    shared: bool = False
    observed: int = 2

    @property
    def drawn(self) -> tuple[str, ...]:
        """What this case has, to be counted."""
        found = {node.op for node in self.nodes}
        for step in self.steps:
            found |= {step.backward, *step.before, *step.after, *(departure.what for departure in step.during)}
        return tuple(sorted(found))

    @property
    def departs(self) -> bool:
        """Whether any step is not as the observed ones."""
        plain = (Step(s.rows) == s and s.rows == self.steps[0].rows for s in self.steps)
        return not all(plain)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        fields: dict[str, Any] = json.loads(text)
        fields["nodes"] = tuple(Node(**node) for node in fields["nodes"])
        fields["steps"] = tuple(_step(step) for step in fields["steps"])
        return cls(**fields)


def _step(fields: dict[str, Any]) -> Step:
    during = tuple(Departure(**departure) for departure in fields["during"])
    return Step(**fields | {"during": during, "before": tuple(fields["before"]), "after": tuple(fields["after"])})


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    names = list(OPS)
    nodes = tuple(Node(rng.choice(names), near(rng), near(rng), rng.randrange(8)) for _ in range(rng.randrange(4, 18)))
    observed = rng.choice((1, 2, 2, 3))
    wild = rng.random()
    """How far the steps depart in this case: some cases do not at all."""
    steps = [Step(8) for _ in range(observed + 1)]
    steps += [_random_step(rng, len(nodes), wild if wild > 0.15 else 0.0) for _ in range(rng.randrange(2, 7))]
    if rng.random() < 0.3:  # what is done in every step, while steps are observed too
        always = _random_step(rng, len(nodes), 0.6)
        steps = [dataclasses.replace(step, during=always.during, after=always.after) for step in steps]
    return Case(
        seed=seed,
        nodes=nodes,
        steps=tuple(steps),
        optimizer=rng.choice(OPTIMIZERS),
        plan=rng.randrange(1 << 16),
        held=rng.choice((0.0, 0.1, 0.3, 0.6)),
        away=rng.random() < 0.35,
        early=rng.random() < 0.2,
        autocast=rng.random() < 0.15,
        shared=rng.random() < 0.2,
        observed=observed,
    )


def near(rng: random.Random) -> int:
    """A value counted from the last one: mostly a recent one."""
    return min(int(rng.expovariate(0.6)), 12)


def _random_step(rng: random.Random, nodes: int, wild: float) -> Step:
    chosen = lambda names, chance: tuple(name for name in names if rng.random() < chance * wild)  # noqa: E731
    during = []
    for node in range(nodes):
        if rng.random() < 0.12 * wild:
            during.append(Departure(node, rng.choice(DURING), rng.randrange(8)))
    return Step(
        rows=8 if rng.random() > 0.2 * wild else rng.choice((4, 6, 12)),
        backward=rng.choice(BACKWARDS) if rng.random() < wild else "once",
        before=chosen(BEFORE, 0.08),
        during=tuple(during),
        after=chosen(AFTER, 0.06),
    )
