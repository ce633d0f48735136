"""Whether a plan is solved now for a batch that no plan in force serves: no solve that a run does not need, and none that takes
longer than it saves.

The first `FREE_STEPS` steps of a forward are free. They show what a run consists of: its first batch is planned for, then
batches that are clearly larger, those that come again, and those that run other ops; `FREE_SOLVES` in all.

After them a plan is solved `SECONDS_APART` seconds after another one at the earliest, and only where it pays: without it, the
batches that it would have served have already lost as many seconds as it is expected to take. Who has occurred that often is
expected to occur as often again. So a batch that never comes again is not planned for, and all solves together take no longer
than what the batches without a plan lost.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from lightning_memopt.session import times
from lightning_memopt.session.shapes import Signature, alike, elements, serves

FREE_STEPS = 10
FREE_SOLVES = 4
SECONDS_APART = 60.0
_LARGER = 1.25
"""A batch that is as many times as large as a lender may replace it in the free steps: sizes that rise take few plans."""
_KINDS = 16
"""Forwards (part of a step, parameters that are trained) that have free steps."""
_REMEMBERED = 64
"""Signatures without a plan whose uses are counted; then the one used least recently is forgotten."""
_TIMED = 32
"""Steps whose median is what a forward and its share of the step take."""


@dataclass
class _Unplanned:
    """Of a signature: how often it ran without a plan, and how many ops its step had. `alone`: it can borrow from nobody."""

    uses: int = 0
    ops: int = 0
    alone: bool = False


class Solves:
    """Counts solves and the steps that go without, by the clock of `times.current`. `count`: solves that were allowed."""

    def __init__(self) -> None:
        self.count = 0
        self._steps = self._forwards = 0
        self._began: dict[Signature, list[int]] = {}
        """Of a kind of forward: the step that began it, and its solves."""
        self._unplanned: dict[Signature, _Unplanned] = {}
        self._last: float | None = None
        self._seconds = 0.0
        self._ops = 0
        self._ended: float | None = None
        self._with: deque[float] = deque(maxlen=_TIMED)
        self._without: deque[float] = deque(maxlen=_TIMED)

    def allows(self, signature: Signature, planned: list[Signature], alone: bool) -> bool:
        """Whether a plan is to be solved for this signature, which none of those `planned` serves. `alone`: it was tried."""
        if self._free(signature):
            family = [s for s in planned if alike(s, signature)]
            if family and not alone and signature not in self._unplanned:
                return any(serves(signature, s) and elements(signature) >= _LARGER * elements(s) for s in family)
            return True
        return self.pays(self._lost(signature), signature)

    def pays(self, lost_seconds: float, signature: Signature) -> bool:
        """Whether a solve that would have saved so many seconds until now may begin."""
        if self._last is not None and times.current.now() - self._last < SECONDS_APART:
            return False
        return lost_seconds > self.expected_seconds(signature)

    def expected_seconds(self, signature: Signature) -> float:
        """What a solve for this signature takes: by the seconds per op of those so far, as long as one of them where its ops
        are not known.
        """
        if not self._ops:
            return 0.0
        found = self._unplanned.get(signature)
        ops = found.ops if found is not None and found.ops else self._ops / max(1, self.count)
        return self._seconds / self._ops * ops

    def forward(self) -> None:
        """A forward begins."""
        self._forwards += 1

    def begins(self, signature: Signature) -> None:
        """A signature is about to be observed, to be solved for."""
        self.count += 1
        if signature[:2] in self._began:
            self._began[signature[:2]][1] += 1
        self._last = times.current.now()

    def ended(self, signature: Signature, ops: int, seconds: float) -> None:
        """A graph of so many ops was solved."""
        self._seconds += seconds
        self._ops += ops
        self._last = times.current.now()
        self._unplanned = {s: w for s, w in self._unplanned.items() if not (s == signature or self._counts(signature, s, w))}

    def waits(self, signature: Signature, alone: bool) -> None:
        """A forward of this signature runs without a plan."""
        found = self._unplanned.pop(signature, None) or _Unplanned()
        found.uses += 1
        found.alone = alone
        self._unplanned[signature] = found
        if len(self._unplanned) > _REMEMBERED:
            del self._unplanned[next(iter(self._unplanned))]

    def recorded(self, signature: Signature, ops: int) -> None:
        """A step without a plan had so many ops."""
        if signature in self._unplanned:
            self._unplanned[signature].ops = ops

    def step_ended(self, planned: bool | None) -> None:
        """A step is over; `planned`: whether a plan was in force, None where its time says nothing about later ones."""
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
        """Seconds that were lost without a plan for this signature: its own uses, and of those that it would have served."""
        if not self._without:
            return 0.0
        saved = statistics.median(self._without) - (statistics.median(self._with) if self._with else 0.0)
        uses = sum(w.uses for s, w in self._unplanned.items() if s == signature or self._counts(signature, s, w))
        return uses * saved

    def _counts(self, signature: Signature, other: Signature, found: _Unplanned) -> bool:
        return not found.alone and serves(signature, other)
