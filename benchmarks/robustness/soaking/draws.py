"""What each step of a soak does, drawn from the seed and the number of the step: the same in the plain and the planned loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.robustness.samples import EVERY

SHAPES = ((24, 16), (24, 8), (32, 12))
"""Rows and length of a batch. The third one's forwards run under autocast."""
AUTOCAST = 2
LAYERS = 3
RESTARTS = (60, 130)
"""Number of steps after which model, optimizer and run are made anew and go on from the checkpoint."""
PLACES = ("forward", "forward", "backward", "backward", "gradient", "updated", "validation", "save")
READS = ("metric", "array", "held")
"""How a loop with a loss head reads logits: by an op, as an array, or after the update."""
AT_HEAD = {"forward": "loss", "gradient": "scores"}
"""Half of the faults at the first places are at the second ones, where there is a loss head: between logits and loss, and where
the gradient of the logits comes by.
"""
LATE = ("before update",)
"""A place where nothing may raise in a loop with early updates: they have happened, and the optimizer's step must follow."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a step.

    place: of PLACES, LATE or AT_HEAD; "timer": a signal after `delay` seconds, wherever the step is then, or behind its end.
    interrupts: SIGINT is raised there, not an exception.
    micro: in which of the step's batches.
    layer: in which layer of the model.
    delay: seconds, for a timer.
    restores: the loop then goes on from the checkpoint; otherwise it sets gradients to zero, and goes on.
    """

    place: str
    interrupts: bool = False
    micro: int = 0
    layer: int = 0
    delay: float = 0.0
    restores: bool = False


@dataclass(frozen=True)
class Step:
    """One step of the loop.

    shapes: of each of its batches, an index in SHAPES: several accumulate.
    autocast: for each batch, whether its forward runs under autocast.
    validates: "", "after" the step, or "within": between two batches that accumulate.
    saves: a checkpoint is written after the step.
    resumes: "", from the "file", or from a "copy" in memory, before the step.
    reads: how logits are read, of READS; "" where they are not.
    fault: what goes wrong; None where nothing does.
    """

    shapes: tuple[int, ...]
    autocast: tuple[bool, ...]
    validates: str = ""
    saves: bool = False
    resumes: str = ""
    reads: str = ""
    fault: Fault | None = None


def draw(seed: int, number: int, early: bool, head: bool = False) -> Step:
    """A step. `early`: parameters may be updated in backward, so what raises from there on leaves half a step behind. `head`:
    there is a loss head. Without it, a step is the same one, but for its fault at the head, and for what it reads.
    """
    if number % EVERY == EVERY // 2:  # after this step a sample is taken
        return Step(shapes=(0,), autocast=(False,))
    rng = random.Random(f"{seed} {number}")
    count = rng.choice((1, 1, 1, 2, 3))
    shapes = tuple(rng.choice((0, 0, 1, 2)) for _ in range(count))
    departs = rng.random() < 0.02
    autocast = tuple((shape == AUTOCAST) != departs for shape in shapes)
    fault = _fault(rng, count, early) if rng.random() < 0.2 else None
    validates = rng.choice(("after", "after", "within")) if rng.random() < 0.1 else ""
    saves = rng.random() < 0.08
    if fault is not None and fault.place == "timer":  # no context of torch's that an interrupt might leave half entered
        shapes = tuple(0 if shape == AUTOCAST else shape for shape in shapes)
        autocast, validates = (False,) * count, ""
    if fault is not None and fault.place in ("validation", "save"):
        validates, saves = ("after", saves) if fault.place == "validation" else (validates, True)
    resumes = rng.choice(("file", "copy")) if rng.random() < 0.03 else ""
    step = Step(shapes, autocast, validates, saves, resumes, fault=fault)
    return _at_head(step, random.Random(f"head {seed} {number}")) if head else step


def _at_head(step: Step, rng: random.Random) -> Step:
    reads = rng.choice(READS) if rng.random() < 0.1 else ""
    fault = step.fault
    if fault is not None and fault.place in AT_HEAD and rng.random() < 0.5:
        fault = replace(fault, place=AT_HEAD[fault.place])
    return replace(step, reads=reads, fault=fault)


def _fault(rng: random.Random, count: int, early: bool) -> Fault:
    if rng.random() < 0.15:
        return Fault("timer", interrupts=True, delay=rng.uniform(1e-4, 0.03), restores=True)
    place = rng.choice(PLACES if early else (*PLACES, *LATE))
    halfway = early and place in ("backward", "gradient")
    return Fault(
        place=place,
        interrupts=rng.random() < 0.5,
        micro=rng.randrange(count),
        layer=rng.randrange(LAYERS),
        restores=halfway or rng.random() < 0.4,
    )
