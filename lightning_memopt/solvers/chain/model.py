"""The data of the chain problem: stages in, a checkpoint tree out.

A chain is a sequence of stages; stage `k` reads boundary `x_k` and produces `x_{k+1}`. Every number is in bytes (`_nbytes`,
int) or in seconds (`_seconds`, float). The names follow Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing
for heterogeneous chains" (2019), with several options per stage instead of one F_all.

A checkpoint tree says how the backward of the stages runs. It has three kinds of nodes. In their description, `t` is the stage
whose backward comes next:

    Checkpoint(first, at, right, left)   run first..at-1, keep x_at; `right` is backward t..at, `left` at-1..first
    Hold(stage, option, rest)            run `stage` holding the option's set; `rest` is the backward of t..stage+1
    Rebuild(stage)                       the last stage of a rerun: its backward rebuilds everything from the input
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_memopt.errors import ChainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to hold tensors inside a stage between its forward and its backward.

    name: its name in messages.
    held_nbytes: bytes of the held set.
    rerun_seconds: seconds to run the stage's forward again with this option.
    rebuild_seconds: seconds of rebuilding in the stage's backward.
    forward_peak_nbytes, backward_peak_nbytes: the peaks of its forward and of its backward.

    The held set excludes the stage's input and output boundaries. The forward peak excludes the input boundary and the base; it
    includes output, interior and workspace. The backward peak counts everything except the input boundary and what is held
    outside the stage: base, held set, rebuilt buffers, both gradients, workspace, and the output if it is saved.
    """

    name: str
    held_nbytes: int
    rerun_seconds: float
    rebuild_seconds: float
    forward_peak_nbytes: int
    backward_peak_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the chain: what it costs to sweep over it, to rebuild it as the last stage of a rerun, and to hold it with
    each option.

    `sweep_peak_nbytes` excludes input and base and includes the output. `rebuild_peak_nbytes` follows the convention of
    `Option.backward_peak_nbytes`. The two bases are bytes that no plan changes: while the user's forward runs this stage, and
    at the start of its backward (including the gradient of its output).
    """

    name: str
    input_nbytes: int
    sweep_seconds: float
    sweep_peak_nbytes: int
    rebuild_seconds: float
    rebuild_peak_nbytes: int
    forward_base_nbytes: int
    backward_base_nbytes: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages 0..L-1 in forward order. Raises ChainError if there is no stage, a number is negative, or the last stage has no
    option.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ChainError("a chain needs at least one stage, and this one has 0: add the stages in forward order")
        if not self.stages[-1].options:
            raise ChainError(
                f"stage {len(self.stages) - 1} ({self.stages[-1].name}) is the last and has 0 options, needs at least "
                "1: its backward follows the user's own forward, so give it a way to be held"
            )
        for index, stage in enumerate(self.stages):
            _check_numbers(index, stage)
            for option in stage.options:
                _check_numbers(index, option)


def _check_numbers(index: int, owner: Stage | Option) -> None:
    """Refuse a size that is not an int >= 0, and seconds that are not finite and >= 0."""
    for key in owner.__slots__:
        value = getattr(owner, key)
        where = f"stage {index} ({owner.name}): {key} is {value!r}, must be"
        if key.endswith("_nbytes") and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ChainError(f"{where} an int of at least 0: fix the profile")
        if key.endswith("_seconds") and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ChainError(f"{where} finite and at least 0: fix the profile")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Run stages first..at-1 and keep only boundary `at`. Then do `right` (the backward down to `at`), then `left`."""

    first: int
    at: int
    right: CheckpointTree = field(repr=False)
    left: CheckpointTree = field(repr=False)


@dataclass(frozen=True, slots=True)
class Hold:
    """Run `stage` and hold `option` (an index). `rest` does the later stages; None if this stage is the last one to do."""

    stage: int
    option: int
    rest: CheckpointTree | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The backward of `stage` rebuilds everything it needs from the stage's input. Nothing runs before it."""

    stage: int


# Trees of long chains are deep, so walk them with an explicit stack (`simulate.operations`), and compare lists of operations
# instead of trees.
CheckpointTree: TypeAlias = Checkpoint | Hold | Rebuild
