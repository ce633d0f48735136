"""Whether to solve now for a batch that no plan in force serves: a solve must be needed, and must save more time than it takes.

The first `FREE_STEPS` steps of a kind of forward are free. They show which batches a run has. Its first batch gets a plan; then
batches that are clearly larger, batches that come again, and batches that run other ops do; `FREE_SOLVES` plans in all.

After them, a solve begins at least `SECONDS_APART` seconds after the last one, and only where it pays: the batches that the
plan would have served have already lost as many seconds without it as the solve is expected to take. They are expected to occur
as often again. So no plan is made for a batch that never comes again, and all solves together take no longer than the batches
without a plan have lost.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from lightning_memopt.session import times
from lightning_memopt.session.forward.shapes import Signature, alike, elements, serves

FREE_STEPS = 10
FREE_SOLVES = 4
SECONDS_APART = 60.0
_LARGER = 1.25
"""In the free steps, a batch that may not borrow gets a plan if it is this many times as large: rising sizes take few plans."""
_KINDS = 16
"""Maximum number of kinds of forwards (part of a step, trained parameters) that have free steps."""
_REMEMBERED = 64
"""Maximum number of signatures without a plan whose uses are counted. The least recently used is forgotten."""
_TIMED = 32
"""Number of steps whose median is the time of a forward with its share of the step."""


@dataclass
class _Unplanned:
    """A signature without a plan.

    uses: how often it ran.
    ops: how many ops its step had; 0 where that is not known.
    alone: it cannot borrow a plan.
    """

    uses: int = 0
    ops: int = 0
    alone: bool = False


class Solves:
    """Counts solves, and steps without a plan, by the clock of `times.current`.

    count: how many solves were allowed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._steps = self._forwards = 0
        self._began: dict[Signature, list[int]] = {}
        """Of each kind of forward: the step in which it first ran, and the number of its solves."""
        self._unplanned: dict[Signature, _Unplanned] = {}
        self._last: float | None = None
        self._seconds = 0.0
        self._ops = 0
        self._ended: float | None = None
        self._with: deque[float] = deque(maxlen=_TIMED)
        self._without: deque[float] = deque(maxlen=_TIMED)

    def allows(self, signature: Signature, planned: list[Signature], alone: bool) -> bool:
        """Whether a plan is to be solved for this signature, which no plan of `planned` serves. `alone`: it tried to borrow."""
        if self._free(signature):
            family = [s for s in planned if alike(s, signature)]
            if family and not alone and signature not in self._unplanned:
                return any(serves(signature, s) and elements(signature) >= _LARGER * elements(s) for s in family)
            return True
        return self.pays(self._lost(signature), signature)

    def pays(self, lost_seconds: float, signature: Signature) -> bool:
        """Whether a solve may begin, if its plan would have saved `lost_seconds` so far."""
        if self._last is not None and times.current.now() - self._last < SECONDS_APART:
            return False
        return lost_seconds > self.expected_seconds(signature)

    def expected_seconds(self, signature: Signature) -> float:
        """Expected seconds of a solve for this signature: its ops, or those of an average solve where they are not known, times
        the seconds per op of all solves so far.
        """
        if not self._ops:
            return 0.0
        unplanned = self._unplanned.get(signature)
        known = unplanned is not None and unplanned.ops
        ops = known or self._ops / max(1, self.count)
        return self._seconds / self._ops * ops

    def forward(self) -> None:
        """A forward begins."""
        self._forwards += 1

    def begins(self, signature: Signature) -> None:
        """A signature is about to be observed, and then solved for."""
        self.count += 1
        if signature[:2] in self._began:
            self._began[signature[:2]][1] += 1
        self._last = times.current.now()

    def ended(self, signature: Signature, ops: int, seconds: float) -> None:
        """A solve for a graph of `ops` ops is over. It took `seconds`."""
        self._seconds += seconds
        self._ops += ops
        self._last = times.current.now()
        self._unplanned = {s: w for s, w in self._unplanned.items() if not (s == signature or self._counts(signature, s, w))}

    def waits(self, signature: Signature, alone: bool) -> None:
        """A forward of this signature runs without a plan."""
        unplanned = self._unplanned.pop(signature, None) or _Unplanned()
        unplanned.uses += 1
        unplanned.alone = alone
        self._unplanned[signature] = unplanned
        if len(self._unplanned) > _REMEMBERED:
            del self._unplanned[next(iter(self._unplanned))]

    def recorded(self, signature: Signature, ops: int) -> None:
        """A step without a plan had `ops` ops."""
        if signature in self._unplanned:
            self._unplanned[signature].ops = ops

    def step_ended(self, planned: bool | None) -> None:
        """A step is over. `planned`: whether a plan was in force; None where later steps will take another time."""
        self._steps += 1
        forwards, self._forwards = max(1, self._forwards), 0
        before, self._ended = self._ended, times.current.now()
        if planned is not None and before is not None:
            (self._with if planned else self._without).append((self._ended - before) / forwards)

    def _free(self, signature: Signature) -> bool:
        kind = signature[:2]
        if kind not in self._began and len(self._began) < _KINDS:
            self._began[kind] = [self._steps, 0]
        began, solves = self._began.get(kind, (-FREE_STEPS, 0))
        return self._steps - began < FREE_STEPS and solves < FREE_SOLVES

    def _lost(self, signature: Signature) -> float:
        """Seconds lost without a plan for this signature: by its own uses, and by uses that the plan would have served."""
        if not self._without:
            return 0.0
        saved = statistics.median(self._without) - (statistics.median(self._with) if self._with else 0.0)
        uses = sum(w.uses for s, w in self._unplanned.items() if s == signature or self._counts(signature, s, w))
        return uses * saved

    def _counts(self, signature: Signature, other: Signature, unplanned: _Unplanned) -> bool:
        """Whether a plan for `signature` would also have served `other`."""
        return not unplanned.alone and serves(signature, other)
