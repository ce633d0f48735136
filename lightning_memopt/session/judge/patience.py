"""How soon and how often a plan is doubted: every tuned number that is used to judge plans, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """The numbers. Those called *chosen* do not follow from a measurement: other values near them would do.

    drifting_forwards: number of forwards in a row that deviate before the step is observed again. Chosen: one forward that
        takes another branch now and then needs no other plan (docs/adr/0006).
    left_out_times: a deviation is small where the forward left out at least this many times the bytes that it kept beside
        the plan. Chosen for LayerDrop, which leaves out whole layers.
    observed_again: how often a signature is observed again because of drift, or because steps took more than predicted. Chosen:
        each time costs a slow step and a solve.
    verifying_nbytes: bytes by which a first step, which verifies, may be above the budget on CUDA. A checksum takes 0.5 MiB
        for a moment, and torch's allocator reserves segments of 2 MiB, in up to two pools.
    measured_next: number of steps that are measured after one that deviated. Chosen: where every step differs, more of them
        would tell little.
    measured_in_all: maximum number of steps that are measured under one plan. Chosen: without the native counter, a
        profiler measures, which slows the step.
    replanned: how often a plan is replaced by a smaller one of its frontier because a step took more than predicted. Chosen.
    regrown: how often because the program holds more outside of the step. Chosen: an EMA or a buffer grows in a few steps.
    slight_share, slight_nbytes: a step that takes no more above its prediction is still the planned one. Predictions are within
        0.1 % on the benchmark models (docs/measurements); under budget="min" 16 KiB count as noise of small models.
    said_again_times: a warning about the peak is repeated when the peak is this many times the one that it named. Chosen.
    proofs: number of measured steps of a lender's borrowers after which the others are neither measured nor verified.
        Chosen: sizes do not change the decisions of a plan.
    """

    drifting_forwards: int = 2
    left_out_times: int = 4
    observed_again: int = 3
    verifying_nbytes: int = 4 << 20
    measured_next: int = 4
    measured_in_all: int = 32
    replanned: int = 3
    regrown: int = 16
    slight_share: float = 0.02
    slight_nbytes: int = 1 << 14
    said_again_times: float = 1.1
    proofs: int = 4


PATIENCE = Patience()
