"""The status of a run as data: for reports, callbacks, and users of a `Run` or a strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan, regions_text
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.pool import PoolStatus
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.cache.plan_cache import PlanCache
from lightning_memopt.session.judge.states import Running, State
from lightning_memopt.session.measure.peak_meter import Metering
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.session.observe.observing import Observing, Waiting
from lightning_memopt.session.observe.silence import Silence
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.pooling import Pooling
from lightning_memopt.session.regions.compiled_regions import CompiledRegions
from lightning_memopt.solvers.planner import Frontier

Phase = Literal["off", "waiting", "observing", "planned", "unplanned"]


@dataclass(frozen=True)
class Transfers:
    """Tensors that were parked and fetched under a plan, as counted and timed so far.

    Args:
        forwards: planned forwards with their backward; steps, if the plan parks only what rests.
        moved_nbytes: bytes copied, both ways, in all of them. What rests counts by its mean over the plan's steps.
        timed: how many of these forwards had their copies and codecs timed.
        copied_seconds: seconds of copies, in the timed forwards.
        waited_seconds: seconds that steps waited for copies, in the timed forwards.
        coded_seconds: seconds of codecs, in the timed forwards.
    """

    forwards: int
    moved_nbytes: int
    timed: int
    copied_seconds: float
    waited_seconds: float
    coded_seconds: float

    @classmethod
    def of(cls, depot: Depot) -> Transfers:
        """The transfers of a depot up to now. Waits until the device has done its copies."""
        times = depot.copied_seconds, depot.waited.seconds, depot.coded.seconds
        return cls(depot.forwards, depot.moved_nbytes, depot.timed, *times)


def transfers_of(state: State | None, at_rest: AtRest) -> Transfers | None:
    """The transfers of the plan in force; None where it parks nothing. Waits as `Transfers.of` does."""
    if not isinstance(state, Running) or not (state.plan.parks or state.plan.in_tiers):
        return None
    steps, rests_nbytes = at_rest.steps, at_rest.planned_nbytes
    if state.depot is None:
        return Transfers(steps, rests_nbytes, 0, 0.0, 0.0, 0.0)
    found = Transfers.of(state.depot)
    return replace(found, moved_nbytes=found.moved_nbytes + rests_nbytes * found.forwards // max(1, steps))


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStatus:
    """A run at one moment; nothing in it changes later. Where batches differ in shape, it is that of the batch with the largest
    unmodified peak.

    Args:
        phase: `"off"`: nothing is done (MEMOPT_DISABLE, or a torch that was not tested). `"waiting"`: no training step was
            seen. `"observing"`: steps are recorded. `"planned"`: a plan is in force. `"unplanned"`: there will be none.
        reason: why there is no plan, where that is known.
        remedy: a change by the user that leads to a plan.
        budget_nbytes: bytes of the device that a step may use; None for `"min"`.
        observed_steps: steps that were recorded; out of `profile_steps`.
        profile_steps: steps to be recorded before a plan is made.
        plan: the plan in force.
        graph: the step that it was made for.
        frontier: all plans that were found for that step; None where the plan came from a file.
        measured_peak_nbytes: the largest peak so far while a plan was in force, from update to update: what runs between
            two steps counts (on the CPU); None where none was measured.
        replans: how often a plan was replaced because a step took more than predicted.
        deviates: whether a forward deviated from the plan. Tensors that did not match were kept.
        compiled: which modules run in compiled code, and the effect on the plan; None where there are none.
        checkpointed: names of the layers whose gradient checkpointing the plan replaces.
        pool: the planned pool: its arena, and what became of the requests; None where none was asked for.
        rates: the measured rates of links and codecs; None where none were needed.
    """

    phase: Phase
    reason: str | None = None
    remedy: str | None = None
    budget_nbytes: int | None = None
    observed_steps: int = 0
    profile_steps: int = 0
    plan: Plan | None = None
    graph: Graph | None = None
    frontier: Frontier | None = None
    measured_peak_nbytes: int | None = None
    replans: int = 0
    deviates: bool = False
    compiled: str | None = None
    checkpointed: tuple[str, ...] = ()
    pool: PoolStatus | None = None
    rates: MachineRates | None = None

    @property
    def predicted_peak_nbytes(self) -> int | None:
        """Bytes of the device that a planned step takes, allocator included. `measured_peak_nbytes` is compared with them."""
        return self.plan.predicted.needed_nbytes if self.plan is not None else None

    @property
    def unmodified_peak_nbytes(self) -> int | None:
        """Bytes of the device that the same step takes without a plan."""
        return self.plan.unmodified_peak_nbytes if self.plan is not None else None


def status_of(
    plans: PlanCache,
    budget_nbytes: int | None,
    silence: Silence,
    regions: CompiledRegions,
    pool: Pooling,
    offloading: Offloading,
    metering: Metering,
) -> RunStatus:
    """The status of an enabled session with these plans: that of the main one."""
    state = plans.main
    if isinstance(state, Running):
        return RunStatus(
            phase="planned",
            budget_nbytes=budget_nbytes,
            plan=state.plan,
            graph=state.program.graph,
            frontier=state.frontier,
            measured_peak_nbytes=max(metering.between.peak_nbytes, plans.measured_nbytes or 0) or None,
            replans=state.past.replanned + state.past.regrown,
            deviates=state.drift.deviated,
            compiled=regions.report or (regions_text(state.plan.regions) if state.plan.regions else None),
            pool=pool.status(),
            rates=offloading.measured,
        )
    if isinstance(state, Failed):
        return RunStatus(phase="unplanned", reason=state.reason, budget_nbytes=budget_nbytes)
    return RunStatus(
        phase="observing" if isinstance(state, Observing | Waiting) else "waiting",
        reason=silence.reason.what if silence.reason is not None else None,
        remedy=silence.reason.fix if silence.reason is not None else None,
        budget_nbytes=budget_nbytes,
        observed_steps=len(state.graphs) if isinstance(state, Observing) else 0,
        profile_steps=state.steps if isinstance(state, Observing) else 0,
    )
