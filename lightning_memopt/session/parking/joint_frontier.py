"""Plans that rebuild and park: a frontier of recomputation, to which the joint solver adds plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from lightning_memopt.clocks import perf_counter, process_time
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, fingerprint
from lightning_memopt.plan import Life, Plan, Prediction, simulate
from lightning_memopt.plan.clocks import leaves_at
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.plan.model import saved_in_tiers
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.simulate import first_read
from lightning_memopt.plan.tiers import Limits, within
from lightning_memopt.runtime.codecs import codec
from lightning_memopt.session import times
from lightning_memopt.session.observe import costs
from lightning_memopt.session.worth import worth
from lightning_memopt.solvers import joint
from lightning_memopt.solvers.planner import UNSEEN_NBYTES, Frontier

_TRIES = 4
"""Maximum number of targets to try if a plan needs more bytes than the joint solver counts, and of budgets to try if the
smallest plan takes too long.
"""


class Offloadable(Protocol):
    """The forms in which tensors may be parked, how much the tiers hold, and the rates of links and codecs (`Offloading`)."""

    config: MemOptConfig
    device: torch.device

    @property
    def limits(self) -> Limits: ...
    @property
    def rests_nbytes(self) -> int: ...
    @property
    def rates(self) -> MachineRates: ...
    def forms(self, graph: Graph) -> dict[int, list[joint.Form]]: ...
    def more_helps(self, nbytes: int) -> bool: ...


def peak_nbytes(graph: Graph, lives: tuple[Life, ...]) -> int:
    """The peak of a plan in bytes, with the workspaces of its codecs."""
    timeline = simulate(graph, lives)
    peak = timeline.predicted.peak_nbytes
    for life in lives:
        if life.how == "fetch" and codec_of(life.form):
            level = max(timeline.nbytes[at] for at in (leaves_at(graph, life.tensor), first_read(graph, life)))
            peak = max(peak, level + _workspace_nbytes(graph, life))
    return peak


def _workspace_nbytes(graph: Graph, life: Life) -> int:
    tensor, name = graph.tensors[life.tensor], codec_of(life.form)
    return codec(name).workspace_nbytes(tensor.size, getattr(torch, tensor.dtype)) if name else 0


@dataclass(frozen=True, eq=False)
class JointFrontier(Frontier):
    """A frontier whose plans may also park tensors. It is never slower than recomputation alone.

    offloading: gives the forms, the rates and the seconds for solving.
    overhead: gives the seconds of the engine's own work under a plan's lives.
    least: the lives of the plan with the smallest peak.
    limits: the most bytes that saved tensors may take in the tier.
    rests_nbytes: the bytes that what rests takes there beside them.
    """

    offloading: Offloadable = field(kw_only=True)
    overhead: Callable[[tuple[Life, ...]], float] = field(kw_only=True)
    least: tuple[Life, ...] = field(kw_only=True)
    limits: Limits = field(default_factory=dict, kw_only=True)
    rests_nbytes: int = field(default=0, kw_only=True)

    @classmethod
    def of(
        cls, frontier: Frontier, offloading: Offloadable, overhead: Callable[[tuple[Life, ...]], float] | None = None
    ) -> JointFrontier:
        """`overhead`: the seconds of the engine's own work; None: those that it takes on this machine."""
        graph = frontier.graph
        fields: dict[str, Any] = {name: getattr(frontier, name) for name in Frontier.__dataclass_fields__}
        plans, limits = (c.lives for c in frontier.candidates), dict(offloading.limits)
        _, least = joint.least(graph, plans, offloading.forms(graph), lambda lives: peak_nbytes(graph, lives), limits)
        own = overhead or costs.overhead(graph, offloading.device).of
        fields["tier_limits"] = tuple((tier, n + offloading.rests_nbytes) for tier, n in limits.items())
        found = cls(
            **fields, offloading=offloading, overhead=own, least=least, limits=limits, rests_nbytes=offloading.rests_nbytes
        )
        predicted = found._predicted(least, simulate(graph, least).predicted)  # one plan's: reserved bytes take long
        return replace(found, smallest_nbytes=min(frontier.smallest_nbytes, predicted.needed_nbytes + UNSEEN_NBYTES))

    def smallest_plan(self, most_seconds: float = math.inf) -> Plan:
        """As of `Frontier`. Between the smallest plan and the one that rebuilds and is fast enough, a few budgets are tried."""
        small = self.plan(self.smallest_nbytes)
        if small.predicted.seconds <= most_seconds:
            return small
        best = self.plan(self._budget_of_fast(most_seconds))
        too_few = self.smallest_nbytes
        for _ in range(_TRIES):
            middle = self.plan((too_few + best.budget_nbytes) // 2)
            if middle.predicted.seconds <= most_seconds:
                best = middle
            else:
                too_few = middle.budget_nbytes
        return best

    @cached_property
    def _forms(self) -> dict[int, list[joint.Form]]:
        return self.offloading.forms(self.graph)

    def _plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget, with a bound for plans that rebuild and park. Raises InfeasibleError where no plan fits."""
        try:
            alone = super()._plan(budget_nbytes)
        except InfeasibleError:  # without a name: an error that its own frames name keeps what they hold from being freed
            together = self._joint(budget_nbytes)
            if together is None:
                raise self.refusal(budget_nbytes, self.tiers_for(budget_nbytes)) from None
            return self._planned(together, budget_nbytes)
        if not alone.predicted.rebuilt_ops:
            return alone  # the unmodified step fits
        together = self._joint(budget_nbytes)
        if together is None:
            return alone
        if alone.predicted.seconds <= together.predicted.seconds:
            return replace(alone, lower_bound_seconds=min(alone.lower_bound_seconds, together.bound_seconds))
        return self._planned(together, budget_nbytes)

    def _planned(self, together: joint.Joint, budget_nbytes: int) -> Plan:
        return Plan(
            fingerprint=fingerprint(self.graph),
            lives=together.lives,
            solver=f"joint ({together.solver})",
            budget_nbytes=budget_nbytes,
            predicted=together.predicted,
            unmodified_peak_nbytes=self.unmodified_peak_nbytes,
            step_seconds=self.graph.step_seconds,
            solve_seconds=self.seconds + together.seconds,
            lower_bound_seconds=together.bound_seconds,
        )

    def _joint(self, budget_nbytes: int) -> joint.Joint | None:
        """A joint plan that needs no more than the budget; None if none was found. The joint solver knows neither the
        workspaces of codecs nor reserved bytes. So it gets smaller targets until its plan fits. The bound of the largest target
        holds for all plans. All of them together take the seconds that a search is worth.
        """
        limit, began, bound = budget_nbytes - UNSEEN_NBYTES, perf_counter(), math.inf
        target, left_seconds = limit, worth(self.graph, self.offloading.config)
        known = [("smallest", self.least)]
        if peak_nbytes(self.graph, self.least) > limit:
            found = self._parking_fewest(limit)
            known += [("fewest parked", lives) for lives in found if within(saved_in_tiers(lives), self.limits)]
        for _ in range(_TRIES):
            solved = joint.solve_joint(
                self.graph,
                target,
                rates=self.offloading.rates,
                forms=self._forms,
                plans=[(c.solver, c.lives) for c in self.candidates],
                limit_seconds=left_seconds if self.reserve is None else left_seconds / 2,  # reserved bytes need another target
                overhead=self.overhead,
                clock=times.current.solver_clock(process_time),
                known=known,
                limits=self.limits,
            )
            if solved is None:
                break
            left_seconds = max(0.0, left_seconds - solved.seconds)
            bound = min(bound, solved.bound_seconds)
            solved = replace(solved, predicted=self._predicted(solved.lives, solved.predicted), bound_seconds=bound)
            if solved.predicted.needed_nbytes <= limit:
                return solved
            target -= solved.predicted.needed_nbytes - limit
        for solver, lives in known:
            predicted = simulate(self.graph, lives, rates=self.offloading.rates).predicted
            predicted = self._predicted(lives, replace(predicted, overhead_seconds=self.overhead(lives)))
            if predicted.needed_nbytes <= limit:
                return joint.Joint(lives, predicted, solver, 0.0, perf_counter() - began)
        return None

    def _parking_fewest(self, limit_nbytes: int) -> Iterator[tuple[Life, ...]]:
        """The lives of a plan that needs no more, and parks the fewest bytes in the tier; none if no plan does, whatever the
        tier holds.
        """
        tier, target = next(iter(self.limits), ""), limit_nbytes
        for _ in range(_TRIES if tier else 0):
            plans = (c.lives for c in self.candidates)
            needed = partial(peak_nbytes, self.graph)
            found = joint.fewest_in_tier(self.graph, plans, self._forms, target, tier, needed)
            if found is None:
                return
            excess = self._predicted(found, simulate(self.graph, found).predicted).needed_nbytes - limit_nbytes
            if excess <= 0:
                yield found
                return
            target -= excess

    def tiers_for(self, budget_nbytes: int) -> dict[str, int]:
        """The budget of the tier that is enough for this budget of the device; none if no tier is short."""
        found = next(self._parking_fewest(budget_nbytes - UNSEEN_NBYTES), None)
        taken = {} if found is None else {tier: n + self.rests_nbytes for tier, n in saved_in_tiers(found).items()}
        return taken if all(map(self.offloading.more_helps, taken.values())) else {}

    def _predicted(self, lives: tuple[Life, ...], predicted: Prediction) -> Prediction:
        """The prediction with the workspaces of codecs and the bytes that the device's allocator reserves."""
        peak = peak_nbytes(self.graph, lives)
        reserved = self.reserve(lives) + peak - predicted.peak_nbytes if self.reserve is not None else 0
        return replace(predicted, peak_nbytes=peak, reserved_nbytes=reserved)
