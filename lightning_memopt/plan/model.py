"""What to do about a step: the lives of every saved buffer, and what that is predicted to cost.

A buffer that is dropped and rebuilt lives several times, so a plan does not hold one decision a buffer but its *lives*:
disjoint intervals on the graph's axis of points, each with how the bytes come into being. Everything else (which ops
run again, in which order, what is freed when) follows from the lives: `lower` is its definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["original", "rebuild", "fetch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One incarnation of a tensor, in memory at the points `born_at .. freed_at`.

    `original`: what the user's forward made is held beyond the point where user code lets go of it.
    `replay`: recorded ops make it again at the unpack point `born_at`.
    `fetch`: it was away since its life before this one, in `form` (plan/forms.py), where it took `parked_nbytes`; at the unpack
    point `born_at` it begins to come back.
    """

    tensor: int
    born_at: int
    freed_at: int
    how: How
    form: str = ""
    parked_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is predicted to cost. `extra_seconds` (of ops that run again) and `extra_flops` are on top of the unmodified
    step; so are `overhead_seconds`, which recording and rebuilding take by themselves on the machine that was measured, 0
    where none was. `reserved_nbytes`: what the device's allocator reserves at most, 0 where nothing is reserved (the CPU).

    Of what is away: `moved_nbytes` over links, both ways, which takes `copy_seconds`, of which the step waits for
    `stall_seconds`; `codec_seconds` of encoding and decoding; `tier_nbytes`, the most that is in tiers at once.
    """

    peak_nbytes: int
    extra_seconds: float
    extra_flops: int
    rebuilt_nbytes: int
    rebuilt_ops: int
    overhead_seconds: float = 0.0
    reserved_nbytes: int = 0
    moved_nbytes: int = 0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    codec_seconds: float = 0.0
    tier_nbytes: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.extra_seconds + self.overhead_seconds + self.stall_seconds + self.codec_seconds

    @property
    def overlap(self) -> float:
        """The share of the copies' time that is hidden behind compute."""
        return 1.0 - self.stall_seconds / self.copy_seconds if self.copy_seconds else 1.0

    @property
    def needed_nbytes(self) -> int:
        """What a budget is compared with, and what is measured: reserved bytes where there is an allocator that reserves."""
        return self.reserved_nbytes or self.peak_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lives for every tensor that autograd saves and for what is held to rebuild them, sorted by (tensor, born_at).

    `lower_bound_seconds`: no plan of this graph's recomputation that fits the budget has fewer extra seconds.
    """

    fingerprint: str
    lives: tuple[Life, ...]
    solver: str
    budget_nbytes: int
    predicted: Prediction
    unmodified_peak_nbytes: int
    step_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    solve_seconds: float = 0.0

    @property
    def predicted_peak_nbytes(self) -> int:
        return self.predicted.peak_nbytes

    @property
    def predicted_seconds(self) -> float:
        return self.step_seconds + self.predicted.seconds
