"""Batches that are larger than all with a plan, under budget="min": no step is to take its unmodified peak.

A plan names tensors and points, not sizes. If plans for two sizes have shown that the ops of a forward do not depend on the
size, a larger batch borrows the plan of the nearest one. All other batches run without a plan. Eviction keeps their steps near
the bytes of that plan: what is not resident may grow in proportion to the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_memopt.graph import resident_nbytes
from lightning_memopt.session.forward.shapes import Signature, alike, times_larger

if TYPE_CHECKING:
    from lightning_memopt.session.judge.states import Running

NEAR, FAR = 1.5, 2.0
"""A batch up to `NEAR` times as large borrows: what is large in the one is large in the other. Where no plan of its own may be
made now, it may be up to `FAR` times as large: it takes more bytes than its own plan would, and less time than without one.
"""


def stretched(lenders: Sequence[tuple[Signature, Running]], signature: Signature, most_times: float) -> Running | None:
    """A state that borrows the plan of the nearest batch; None where this one is more than `most_times` as large, or where
    the ops of the two may differ.
    """
    kin = [(times_larger(s, signature), state) for s, state in lenders if alike(s, signature)]
    times, lender = min(kin, key=lambda pair: pair[0], default=(0.0, None))
    if lender is None or times > most_times or _keeps_for_speed(lender):
        return None
    if not any(state.program.names == lender.program.names for _, state in kin if state is not lender):
        return None
    return lender.lend(_needed_nbytes(lender, times) - lender.plan.predicted.needed_nbytes)


def limit_nbytes(plans: Sequence[tuple[Signature, Running]], signature: Signature) -> int | None:
    """Bytes that about suffice for a step of this signature. None where no plan is of such a forward, or where the nearest one
    keeps all although less would do: then rebuilding takes too long.
    """
    kin = [(max(1.0, times_larger(s, signature)), state) for s, state in plans if alike(s, signature)]
    nearest = min((times for times, _ in kin), default=0.0)
    near = [state for times, state in kin if times == nearest]
    if not near or any(map(_keeps_for_speed, near)):
        return None
    return min(_needed_nbytes(state, nearest) for state in near)


def _needed_nbytes(state: Running, times: float) -> int:
    """Bytes of a step in which all that is not resident takes `times` the bytes that it takes under the plan."""
    resident = resident_nbytes(state.program.graph)
    return resident + int(times * (state.plan.predicted.needed_nbytes - resident))


def _keeps_for_speed(state: Running) -> bool:
    """Whether the plan rebuilds nothing although a smaller one exists: that one takes too long (`max_slowdown`)."""
    smallest = state.plan.budget_nbytes if state.frontier is None else state.frontier.smallest_nbytes
    return state.program.empty and state.plan.budget_nbytes > smallest
