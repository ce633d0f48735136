"""How much of a run observing takes: an observed step is several times slower, so observing must come to an end, or stay a
small part of the run.

After the first steps and the first minute, a step is observed only while observing has taken no more than a twentieth of the
run's time. Where observed steps lead to no plan, observing rests, each time for twice as many of them. A step with many
forwards whose graphs are all held, with backwards in between, is observed in its first forwards; once it is known how many
there are, in its last one alone, for which the plan is made.

Two kinds of runs are observed without these limits: those where tensors had to be evicted, because observing keeps the
budget; and those whose ranks decide together, because their clocks differ.
"""

from __future__ import annotations

from lightning_memopt.session import times

FREE_SECONDS = 60.0
FREE_STEPS = 4
SHARE = 0.05
"""The share of a run's time that observing may take, after the free seconds and steps."""
PILE = 8
"""Maximum number of forwards, each of which begins while the graph of the one before is held, that are observed."""
REST = 20
"""Number of observed steps without a plan after which as many steps are not observed. It doubles each time."""


class Effort:
    """Counts what is observed of a run.

    bounded: observing has bounds.
    evicts: tensors were evicted in an observed step.
    pile: how many forwards of this step began while the graph of the one before was held, after a backward of another part.
    """

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded
        self.evicts = False
        self.pile = 0
        self._said = False
        self._run_began: float | None = None
        self._step_began: float | None = None
        self._seconds = 0.0
        self._steps = self._fruitless = self._resting = 0
        self._rest = REST
        self._rounds = self._last_rounds = 0

    def is_due(self) -> bool:
        """Whether a step may be observed now, for all the time that observing has taken so far."""
        now = times.current.now()
        if self._run_began is None:
            self._run_began = now
        elapsed = now - self._run_began
        free = self._steps < FREE_STEPS or elapsed < FREE_SECONDS
        return free or self._is_unbounded or self._seconds <= SHARE * elapsed

    def rests(self) -> bool:
        """Whether the step that begins is not observed because many before it led to no plan. Counts it."""
        if not self._resting and self._fruitless >= self._rest:
            self._resting, self._fruitless = self._rest, 0
            self._rest *= 2
        if self._resting and not self._is_unbounded:
            self._resting -= 1
            return True
        self._fruitless += 1
        return False

    def looks_at(self, piles: bool) -> bool:
        """Whether the next forward of this step is observed. Counts it. `piles`: the graph of the one before it is held."""
        self._rounds += 1
        self.pile += piles
        if self._is_unbounded:
            return True
        return self._rounds >= self._last_rounds if self._last_rounds else self.pile < PILE

    @property
    def looks_at_last(self) -> bool:
        """Whether only the last of many forwards whose graphs are held is observed."""
        return bool(self._last_rounds) and not self._is_unbounded

    def begins(self) -> None:
        """An observed step begins."""
        self._steps += 1
        self._step_began = times.current.now()

    def ends(self) -> None:
        """The observed step is over, or was given up."""
        began, self._step_began = self._step_began, None
        if began is not None:
            self._seconds += times.current.now() - began

    def step_ended(self) -> int:
        """A step is over, observed or not. Returns how many forwards it had, the first time that graphs of several were held;
        else 0.
        """
        rounds, pile = self._rounds, self.pile
        many = rounds if self._last_rounds else pile
        self._last_rounds = rounds if many >= PILE else 0
        self._rounds = self.pile = 0
        first, self._said = bool(pile) and not self._said, self._said or bool(pile)
        return rounds if first else 0

    def succeeded(self) -> None:
        """A step was observed to its end."""
        self._fruitless = self._resting = 0
        self._rest = REST

    @property
    def _is_unbounded(self) -> bool:
        return self.evicts or not self.bounded
