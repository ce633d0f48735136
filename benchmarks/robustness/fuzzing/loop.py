"""A training loop of the fuzzer as data: a random program as the model, and what the loop does. JSON says all of it."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.robustness.fuzzing.case import OPTIMIZERS, Case, Node, near
from benchmarks.robustness.fuzzing.ops import OPS

FEATURES = {
    "forwards": "three forwards before one backward",
    "accumulate": "two backwards before one update",
    "method": "the loop calls model.score(x) and never model(x)",
    "parts": "the loop calls model.encoder(x) and model.decoder(h)",
    "hooks": "an optimizer for each parameter, which steps in a hook inside backward",
    "forward now and then": "every n-th step a hook of a module in the forward does more",
    "backward now and then": "every n-th step a hook of a module in backward does more",
    "update now and then": "every n-th step more is done between backward and update",
    "teacher": "another model's forward between update and forward, whose output is a part of the loss",
    "average": "an average of the weights after the update, in place",
    "copy": "a copy of the weights after the update; the one before is forgotten",
    "evaluate": "every n-th step a batch is evaluated after the update",
    "clip": "gradients are clipped",
    "zero first": "gradients are forgotten between forward and backward, not after the update",
    "held": "the loop holds the outputs of a step until the next backward begins",
    "autocast": "bfloat16",
    "head": "a loss head of many classes, which runs in tiles where the budget needs it",
    "parked": "activations and optimizer state go to a disk, where the budget needs it",
    "marked": "the same, and the loop marks its last backward, for updates in it",
    "restored": "the same, and every n-th step a checkpoint is made after the update, from which the loop goes on",
    "state read": "the same, and every n-th step the loop reads the state of the optimizer",
    "zero in place": "the same, and gradients are set to zero, not forgotten",
    "gradients written": "the same, and every n-th step gradients are scaled, through `data` or not",
    "gradients viewed": "the same, and NumPy reads gradients where they are",
    "gradients held": "the same, and the loop holds the gradients of a step until the next backward is over",
    "frozen": "the same, and some layers are frozen",
    "adapters": "the same, and all matrices are frozen",
    "unfreezes": "the same, and what is frozen is not from the middle of the run on",
    "freezes": "the same, and the first half of the model is frozen from the middle of the run on",
    "disk budget": "the same, and the disk has room for a part of it",
}
_RARE = 0.15
"""The chance of each feature. A loop has two of them on average."""
_EXCLUSIVE = (
    ("method", "parts"),
    ("hooks", "accumulate"),
    ("hooks", "clip"),
    ("hooks", "marked"),
    ("hooks", "frozen"),
    ("hooks", "adapters"),
    ("marked", "gradients written"),
)
"""Of these the second one is left out: a loop calls in one way, and after a hook no gradient is left to add to, to clip or to
update with, and a frozen weight has no hook. Gradients that are read now and then, are read too late for updates in backward.
"""
_OWN = ("head", "parked")
"""Features with generators of their own: without them, a seed is the loop that it was before."""
_WITH_PARKED = ("marked", "restored", "state read")
"""Features of loops whose state is parked."""
_RESTING = (
    "zero in place",
    "gradients written",
    "gradients viewed",
    "gradients held",
    "frozen",
    "adapters",
    "unfreezes",
    "freezes",
    "disk budget",
)
"""More of them, drawn by another generator."""
SHARES = (0.0, 0.3, 0.5, 0.8, 1.0)
_SHARES_PARKED = (0.0, -0.5, -0.2, 0.0, 0.2)


@dataclass(frozen=True)
class Loop:
    """See the module. `features`: see `FEATURES`; `every`: the n of those that come every n-th step.

    share: the budget, as a share of what a plain step takes above what is there between steps; 0 is the smallest plan. Below 0,
        this share of the optimizer state is taken from what is there between steps.
    observed: steps that are observed before there is a plan.
    """

    seed: int
    nodes: tuple[Node, ...]
    features: tuple[str, ...] = ()
    every: int = 1
    steps: int = 12
    rows: int = 256
    optimizer: str = "sgd"
    share: float = 0.5
    observed: int = 3

    @property
    def drawn(self) -> tuple[str, ...]:
        """What this case has, to be counted."""
        return (*self.features, *sorted({node.op for node in self.nodes}))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Loop:
        fields: dict[str, Any] = json.loads(text)
        fields["nodes"] = tuple(Node(**node) for node in fields["nodes"])
        return cls(**fields | {"features": tuple(fields["features"])})


def read(text: str) -> Case | Loop:
    """A case of either kind, from its JSON."""
    return Loop.from_json(text) if "features" in json.loads(text) else Case.from_json(text)


def draw_loop(seed: int) -> Loop:
    """The loop of a seed."""
    rng = random.Random(seed)
    names = [name for name in OPS if name != "routed"]  # its sizes follow the data: nobody knows what the next batch takes
    nodes = tuple(Node(rng.choice(names), near(rng), near(rng), rng.randrange(8)) for _ in range(rng.randrange(4, 15)))
    features = [name for name in FEATURES if name not in (*_OWN, *_WITH_PARKED, *_RESTING) and rng.random() < _RARE]
    features += [name for name in _OWN if random.Random(f"{name} {seed}").random() < _RARE]
    own = random.Random(f"of {_OWN[-1]} {seed}")
    parked = "parked" in features
    features += [name for name in _WITH_PARKED if parked and own.random() < 2 * _RARE]
    resting = random.Random(f"resting {seed}")
    features += [name for name in _RESTING if parked and resting.random() < 2 * _RARE]
    for one, other in _EXCLUSIVE:
        if one in features and other in features:
            features.remove(other)
    every = rng.choice((1, 2, 2, 3, 4))
    changes = bool({"unfreezes", "freezes"} & set(features))  # in the middle: from there on the package begins anew
    return Loop(
        seed=seed,
        nodes=nodes,
        features=tuple(features),
        every=every,
        steps=max(12, 4 * every + 2) << changes,
        rows=rng.choice((64, 128, 256)),
        optimizer=rng.choice(OPTIMIZERS),
        share=(rng.choice(SHARES), own.choice(_SHARES_PARKED))[parked],
        observed=rng.choice((1, 2, 3, 3)),
    )
