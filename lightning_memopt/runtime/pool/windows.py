"""Which window of a native pool is open: the steps of an input signature are logged, then planned.

    state of a signature   its next steps are                         next state
    new                    logged: one step, and the next one to      planned, or given up if `solve` finds no addresses
                           see how long its buffers live
    planned                served from the arena                      new, when steps in a row differ from the planned one
    given up               served by the ordinary allocator           none

All signatures share one arena, as large as the largest of them needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_memopt.native import Counts, Lane
from lightning_memopt.plan import Addresses
from lightning_memopt.runtime.pool.steps import LoggedStep
from lightning_memopt.units import format_nbytes

Solve = Callable[[LoggedStep, int], Addresses | str]
Decided = Callable[[object, Addresses], None]
_IN_A_ROW = 3
"""Number of steps in a row with requests that fell through after which a step is logged again."""
_AGAIN = 3
"""Maximum number of times that a signature is logged again."""


@dataclass(frozen=True)
class PoolStatus:
    """The planned pool at one moment.

    reason: why no step is served from an arena; None if steps are, or will be.
    addresses: those of the signature with the largest arena; None while steps are logged.
    steps: number of steps that were served from the arena.
    deviating: number of these steps with requests that fell through to the ordinary allocator.
    reserved_nbytes: bytes of the arena plus maximum bytes outside it, in the last of these steps.
    last: how the requests of the last of these steps were served.
    total: the same for all of these steps.
    """

    reason: str | None = None
    addresses: Addresses | None = None
    steps: int = 0
    deviating: int = 0
    reserved_nbytes: int = 0
    last: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)


class _Plan:
    """Addresses that the native pool knows until this object is freed.

    number: the plan's number in the native pool.
    """

    def __init__(self, native: Lane, addresses: Addresses) -> None:
        self.addresses, self._native = addresses, native
        self.number = native.add(addresses.nbytes, addresses.offsets)

    def __del__(self) -> None:
        self._native.remove(self.number)


@dataclass
class _Signature:
    """What is known of a signature's steps.

    plan: the plan of their addresses; None while there is none.
    reason: why its steps are neither logged nor planned, else None.
    deviating: number of steps in a row with requests that fell through.
    again: number of times that it was logged again.
    said: whether a message has said that requests fall through.
    """

    plan: _Plan | None = None
    reason: str | None = None
    deviating: int = 0
    again: int = 0
    said: bool = False


@dataclass
class _Log:
    """A log of a signature's step."""

    key: weakref.ref[object]
    ended: tuple[Sequence[tuple[int, int | None]], int] | None = field(default=None)
    """(the log, live bytes of the process) when the step ended."""


class PoolWindows:
    """The windows of one run. `begins` is called when a step begins, `rests` when steps without a window follow.

    solve: gives the addresses for a logged step within a number of bytes, or the reason why there are none.
    decided: is told of the addresses that were solved for the signature of a key.
    """

    _ended: PoolStatus | None = PoolStatus()
    """The status when the run was closed. A class attribute, because `__del__` also runs after an interrupted constructor."""

    def __init__(
        self, native: Lane, solve: Solve, say: Callable[[str], None], decided: Decided = lambda key, addresses: None
    ) -> None:
        self._native, self._solve, self._say, self._decided = native, solve, say, decided
        self._signatures: weakref.WeakKeyDictionary[object, _Signature] = weakref.WeakKeyDictionary()
        self._current: _Signature | None = None  # its plan is in force
        self._log: _Log | None = None
        self._beside = native.outside_window()
        self._steps = self._deviating = self._reserved_nbytes = self._budget_nbytes = 0
        self._last = self._total = Counts()
        self._ended = None

    def begins(self, key: object, budget_nbytes: int, planned: Addresses | None = None) -> None:
        """A step of a signature begins in this thread. `key`: an object that lives as long as the signature does.
        `budget_nbytes`: maximum for the arena and all other bytes of the process. `planned`: the addresses that its plan has. A
        new signature runs by them, if the budget has room.
        """
        if self._ended is not None:
            return
        self._judge()
        if self._log is not None and self._goes_on(self._log, key, budget_nbytes):
            return
        if planned is not None and key not in self._signatures and planned.needed_nbytes <= budget_nbytes:
            self._signatures[key] = _Signature(_Plan(self._native, planned))
        signature = self._signatures.setdefault(key, _Signature())
        if signature.plan is not None and not self._native.begin(signature.plan.number, self._arena_nbytes):
            self._give_up(signature, f"there is no memory for an arena of {format_nbytes(self._arena_nbytes)}")
        if signature.plan is not None:
            self._current, self._budget_nbytes = signature, budget_nbytes
            if self._beside is not None:
                self._beside.reset()
            return
        self._native.end(free=True)
        if signature.reason is None:
            self._native.log()
            self._log = _Log(weakref.ref(key))

    def rests(self) -> None:
        """Until the next step begins, the ordinary allocator serves all requests. The arena is freed with its last buffer."""
        if self._ended is not None:
            return
        self._judge()
        log, self._log = self._log, None
        if log is not None:
            self._native.log_ends()
        self._native.end(free=True)

    def close(self) -> None:
        """The run is over. May be called again. The arena is freed with the last buffer that is still in it."""
        if self._ended is not None:
            return
        self.rests()
        self._ended = self.status()
        self._signatures.clear()
        if self._beside is not None:
            self._beside.close()

    def __del__(self) -> None:
        self.close()  # otherwise a log or a window would stay open

    def status(self) -> PoolStatus:
        """The pool's status, without the step that is running."""
        if self._ended is not None:
            return self._ended
        signatures = list(self._signatures.values())
        known = [s.plan.addresses for s in signatures if s.plan is not None]
        largest = max(known, key=lambda addresses: addresses.arena_nbytes, default=None)
        reasons = [s.reason for s in signatures if s.reason is not None]
        reason = reasons[0] if reasons and len(reasons) == len(signatures) else None
        return PoolStatus(reason, largest, self._steps, self._deviating, self._reserved_nbytes, self._last, self._total)

    @property
    def _arena_nbytes(self) -> int:
        return max((s.plan.addresses.arena_nbytes for s in self._signatures.values() if s.plan is not None), default=0)

    def _goes_on(self, log: _Log, key: object, budget_nbytes: int) -> bool:
        """A step begins during a log. Returns whether the log goes on; otherwise addresses are solved."""
        logged = log.key()
        requests = self._native.requests()
        if log.ended is None:
            log.ended = requests, self._native.live_nbytes
            if logged is key:
                return True
        self._native.log_ends()
        self._log = None
        if logged is not None:
            at_end, live_nbytes = log.ended
            step = LoggedStep.of(requests, len(at_end), live_nbytes + self._native.others_nbytes(), at_end)
            signature = self._signatures[logged]
            self._planned(signature, step, budget_nbytes)
            if signature.plan is not None:
                self._decided(logged, signature.plan.addresses)
        return False

    def _planned(self, signature: _Signature, step: LoggedStep, budget_nbytes: int) -> None:
        """Put the addresses for a logged step in force, if there are any."""
        addresses = self._solve(step, budget_nbytes) if step.requests else "its steps free nothing of what they request"
        if isinstance(addresses, str):
            self._give_up(signature, addresses)
        else:
            signature.plan = _Plan(self._native, addresses)

    def _give_up(self, signature: _Signature, reason: str) -> None:
        signature.plan, signature.reason = None, reason
        self._say(f"MemOpt: no planned pool for this batch: {reason}. Training goes on with the ordinary allocator.")

    def _judge(self) -> None:
        """If a planned step has just ended, check whether its requests came as planned."""
        signature, self._current = self._current, None
        if signature is None or signature.plan is None:
            return
        self._native.end(free=False)
        self._reserved_nbytes = self._native.arenas_nbytes()[0] + (0 if self._beside is None else self._beside.peak_nbytes)
        self._last = counts = self._native.counts()
        self._total += counts
        self._steps += 1
        if not counts.fallen:
            signature.deviating = 0
            return
        self._deviating += 1
        signature.deviating += 1
        if not signature.said:
            signature.said = True
            self._say(
                f"MemOpt: a step differs from its planned pool: {counts.fallen} of its requests "
                f"({format_nbytes(counts.fallen_nbytes)}) went to the ordinary allocator. Results do not change."
            )
        if self._reserved_nbytes > self._budget_nbytes:
            what = f"the arena, and what fell through, took {format_nbytes(self._reserved_nbytes)}, above the budget"
            self._give_up(signature, f"{what} of {format_nbytes(self._budget_nbytes)}")
            return
        if signature.deviating < _IN_A_ROW:
            return
        if signature.again < _AGAIN:
            self._say(f"MemOpt: {signature.deviating} steps in a row differ from their planned pool; logging one again")
            signature.plan, signature.deviating = None, 0
            signature.again += 1
        elif counts.fallen_nbytes > counts.served_nbytes:
            self._give_up(signature, "the requests of its steps differ too much")
