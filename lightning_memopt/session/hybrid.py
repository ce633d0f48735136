"""What may be away in a session: which tensors in which forms, how fast this machine's links and codecs are, and the tiers.

Nothing is measured or made before a plan is solved for a budget that the step does not fit as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.graph import BEFORE, Graph, Op, fingerprint
from lightning_memopt.plan import Life, Plan, Prediction, simulate
from lightning_memopt.plan.clocks import leaves_at
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.readers import Need, lossy, need
from lightning_memopt.plan.simulate import first_read
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.codecs import NAMES, codec
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier, HostTier, Tier
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.session import costs, times
from lightning_memopt.solvers import joint
from lightning_memopt.solvers.planner import UNSEEN_NBYTES, Frontier
from lightning_memopt.torch_private import schema_of
from lightning_memopt.trace.link import measure

LEAST_NBYTES = 4096
"""What is smaller stays: a copy or a codec takes longer than it is worth."""
LOSSY = "block8"
_ALIGN_NBYTES = 4096
_PROBE_NBYTES = 32 << 20
_TRIES = 4
"""Targets below the budget that are tried, where a plan needs more than joint counts."""


class Hybrid:
    """See the module. `tier`: the name of the tier, "" without offload."""

    def __init__(self, device: torch.device, config: MemOptConfig) -> None:
        self.device, self.config = device, config
        name, self.directory = config.offload_to
        self.tier = {"none": "", "auto": "host" if device.type == "cuda" else ""}.get(name, name)
        if self.tier == "host" and device.type == "cpu":
            raise ConfigError("offload='host' puts bytes into the memory that the budget is about; on the CPU, use 'disk'.")
        self.codec = {"lossy": LOSSY, "none": "", "lossless": ""}.get(config.compress, config.compress)
        self._depots: dict[int, tuple[Plan, Depot | None]] = {}

    def check(self) -> None:
        """Before anything runs: raise OffloadError where the disk's directory cannot be used."""
        if self.tier == "disk":
            Scratch(0, self.directory).close()

    @property
    def wanted(self) -> bool:
        return bool(self.tier) or self.config.compress != "none"

    @property
    def _gated(self) -> str:
        """The same for results of ReLU: it keeps what is above 0 above 0. Not every codec has such a form."""
        return self.codec.replace("block", "gated") if self.codec.startswith("block") else ""

    @cached_property
    def rates(self) -> MachineRates:
        """Measured once, in less than a second."""
        return times.current.of_transfers(self._measured)

    def _measured(self) -> MachineRates:
        used = {"bools", "positive", self.codec, self._gated} & set(NAMES) if self.config.compress != "none" else set()
        tiers = [self._made(self.tier, _PROBE_NBYTES)] if self.tier else []
        try:
            return costs.in_own_thread(lambda: measure(tiers, self.device, [codec(name) for name in sorted(used)]))
        finally:
            for tier in tiers:
                tier.close()

    def forms(self, graph: Graph) -> dict[int, list[joint.Form]]:
        """The forms in which each tensor of the forward may be away."""
        found = {}
        for op in graph.forward:
            for t in op.outputs:
                tensor = graph.tensors[t]
                if tensor.nbytes < LEAST_NBYTES or tensor.born_at == BEFORE:
                    continue
                found[t] = codes = self._codes(graph, t)
                if self.tier:
                    found[t] = [(self.tier, tensor.nbytes), *codes, *((f"{code}@{self.tier}", n) for code, n in codes)]
        return found

    def _codes(self, graph: Graph, t: int) -> list[joint.Form]:
        """The codecs that may hold a tensor: those that its readers cannot tell, or those that were asked for."""
        tensor = graph.tensors[t]
        if self.config.compress == "none" or not tensor.dtype:
            return []
        dtype, names = getattr(torch, tensor.dtype), []
        if dtype is torch.bool:
            names.append("bools")
        elif (rectified := graph.producers[t].name.startswith("aten::relu")) and _needs(graph, t) <= {"sign", "shape"}:
            names.append("positive")
        elif self.codec and _bears_errors(graph, t):
            names.append(self.codec)
        elif rectified and self._gated and _bears_errors(graph, t, gated=True):
            names.append(self._gated)
        accepted = (codec(name) for name in names)
        return [(c.name, c.encoded_nbytes(tensor.size, dtype)) for c in accepted if c.accepts(tensor.size, dtype)]

    def depot_of(self, plan: Plan, in_force: Iterable[Plan] | None = None) -> Depot | None:
        """Tiers with room for what a plan puts there, the same ones for the same plan; None where nothing goes away.

        Those of plans that are not `in_force` any more end here, unless something is still away there. None: all stay.
        """
        known = self._depots.get(id(plan))
        if known is None:
            stay = None if in_force is None else {id(p) for p in in_force}
            for key, (_, depot) in list(self._depots.items()):
                if stay is not None and key not in stay and (depot is None or not depot.used_nbytes):
                    self._end(key)
            known = self._depots[id(plan)] = plan, self._new_depot(plan)
        return known[1]

    def _new_depot(self, plan: Plan) -> Depot | None:
        fetched = {life.tensor: life for life in plan.lives if life.how == "fetch"}
        if not fetched:
            return None
        nbytes: dict[str, int] = {}
        for life in fetched.values():
            if name := tier_of(life.form):
                nbytes[name] = nbytes.get(name, 0) + -(-life.parked_nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        more = lambda name: self._made(name, nbytes[name])  # noqa: E731
        return Depot({name: more(name) for name in nbytes}, more=more)

    def _made(self, name: str, nbytes: int) -> Tier:
        return DiskTier(nbytes, self.directory, self.device) if name == "disk" else HostTier(nbytes, self.device)

    def frontier(self, frontier: Frontier) -> Frontier:
        """The frontier with plans that put tensors away, where any may be."""
        return HybridFrontier.of(frontier, self) if self.wanted else frontier

    def close(self) -> None:
        for key in list(self._depots):
            self._end(key)

    def _end(self, key: int) -> None:
        _, depot = self._depots.pop(key)
        if depot is not None:
            depot.retire()  # whoever holds a handle may still ask, also when the block has been left


def peak_nbytes(graph: Graph, lives: tuple[Life, ...]) -> int:
    """The peak of a plan, with what its codecs allocate beyond what they read and make."""
    timeline = simulate(graph, lives)
    found = timeline.predicted.peak_nbytes
    for life in lives:
        if life.how == "fetch" and codec_of(life.form):
            there = max(timeline.nbytes[at] for at in (leaves_at(graph, life.tensor), first_read(graph, life)))
            found = max(found, there + _workspace_nbytes(graph, life))
    return found


def _workspace_nbytes(graph: Graph, life: Life) -> int:
    tensor, name = graph.tensors[life.tensor], codec_of(life.form)
    return codec(name).workspace_nbytes(tensor.size, getattr(torch, tensor.dtype)) if name else 0


@cache
def _tensor_arguments(name: str) -> tuple[str, ...] | None:
    """Names of the arguments of an op, `aten::name.overload`, that are tensors; None where they cannot be told apart."""
    try:
        schema = schema_of(*name.partition(".")[::2])
    except RuntimeError:
        return None
    kinds = [(a.name, str(a.real_type)) for a in schema.arguments]
    return None if any("Tensor[]" in kind for _, kind in kinds) else tuple(n for n, kind in kinds if "Tensor" in kind)


def _readers(graph: Graph, t: int) -> list[tuple[Op, str]]:
    """Backward ops that read a tensor, and as which argument: "" where that is not certain."""
    found = []
    for op in graph.consumers.get(t, ()):
        if op.phase != "forward":
            names = _tensor_arguments(op.name)
            known = names is not None and len(names) == len(op.inputs)
            found.append((op, names[op.inputs.index(t)] if known and names is not None else ""))
    return found


def _needs(graph: Graph, t: int) -> set[str]:
    """What backward needs of the result of a ReLU."""
    found = _readers(graph, t)
    return {_need(graph, t, op, argument) for op, argument in found} if found else {"value"}


def _need(graph: Graph, t: int, op: Op, argument: str) -> Need:
    """What a backward op needs of the result of a ReLU. Where `threshold` reads it too, whose backward cannot be told from
    ReLU's: all of it.
    """
    compared = any(o.phase == "forward" and _base(o).startswith("threshold") for o in graph.consumers.get(t, ()))
    return need(_base(op), argument, threshold=math.nan if compared else 0.0)


def _base(op: Op) -> str:
    return op.name.partition("::")[2].partition(".")[0]


def _bears_errors(graph: Graph, t: int, gated: bool = False) -> bool:
    """Whether errors in a tensor stay in the gradient of one weight: every reader is such, and met a parameter in forward.

    `gated`: readers that ask for no more than the sign or the size are passed over, because it is kept.
    """
    found = [(op, arg) for op, arg in _readers(graph, t) if not gated or _need(graph, t, op, arg) == "value"]
    forward = [op for op in graph.consumers.get(t, ()) if op.phase == "forward" and op.heavy]
    met = all(any(graph.tensors[i].kind == "parameter" for i in op.inputs) for op in forward)
    return bool(found and forward and met and all(lossy(_base(op), argument) for op, argument in found))


@dataclass(frozen=True, eq=False)
class HybridFrontier(Frontier):
    """A frontier whose plans may put tensors away: never slower than recomputation alone."""

    hybrid: Hybrid = field(kw_only=True)
    overhead: Callable[[tuple[Life, ...]], float] = field(kw_only=True)
    least: tuple[Life, ...] | None = field(kw_only=True, default=None)

    @classmethod
    def of(cls, frontier: Frontier, hybrid: Hybrid) -> HybridFrontier:
        graph = frontier.graph
        fields: dict[str, Any] = {name: getattr(frontier, name) for name in Frontier.__dataclass_fields__}
        if graph.device != "cuda":  # what the allocator reserves for such plans is known when they are made
            plans = (c.lives for c in frontier.candidates)
            least, fields["least"] = joint.least(graph, plans, hybrid.forms(graph), lambda lives: peak_nbytes(graph, lives))
            fields["smallest_nbytes"] = min(frontier.smallest_nbytes, least + UNSEEN_NBYTES)
        return cls(**fields, hybrid=hybrid, overhead=lambda lives: costs.measured(graph.device).of(Program(graph, lives)))

    @cached_property
    def _forms(self) -> dict[int, list[joint.Form]]:
        return self.hybrid.forms(self.graph)

    def plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget, with the bound of recomputation and transfers together. Raises InfeasibleError."""
        alone: Plan | InfeasibleError
        try:
            alone = super().plan(budget_nbytes)
        except InfeasibleError as error:
            alone = error
        if isinstance(alone, Plan) and not alone.predicted.rebuilt_ops:
            return alone  # it fits as it is
        found = self._joint(budget_nbytes)
        if found is None:
            if isinstance(alone, InfeasibleError):
                raise alone
            return alone
        if isinstance(alone, Plan) and alone.predicted.seconds <= found.predicted.seconds:
            return replace(alone, lower_bound_seconds=min(alone.lower_bound_seconds, found.bound_seconds))
        return Plan(
            fingerprint=fingerprint(self.graph),
            lives=found.lives,
            solver=f"joint ({found.solver})",
            budget_nbytes=budget_nbytes,
            predicted=found.predicted,
            unmodified_peak_nbytes=self.unmodified_peak_nbytes,
            step_seconds=self.graph.step_seconds,
            solve_seconds=self.seconds + found.seconds,
            lower_bound_seconds=found.bound_seconds,
        )

    def _joint(self, budget_nbytes: int) -> joint.Joint | None:
        """What joint finds that needs no more than the budget; it knows neither workspaces of codecs nor what is reserved,
        so it is asked for less until that fits. What bounds all plans is its bound for the most that it was asked for.
        """
        room, began, bound = budget_nbytes - UNSEEN_NBYTES, time.perf_counter(), math.inf
        target = room
        for _ in range(_TRIES):
            found = joint.solve_joint(
                self.graph,
                target,
                rates=self.hybrid.rates,
                forms=self._forms,
                plans=[(c.solver, c.lives) for c in self.candidates],
                limit_seconds=self.hybrid.config.solver_seconds,
                overhead=self.overhead,
                clock=times.current.solver_clock(time.process_time),
            )
            if found is None:
                break
            bound = min(bound, found.bound_seconds)
            found = replace(found, predicted=self._predicted(found.lives, found.predicted), bound_seconds=bound)
            if found.predicted.needed_nbytes <= room:
                return found
            target -= found.predicted.needed_nbytes - room
        if self.least is None:
            return None
        predicted = simulate(self.graph, self.least, rates=self.hybrid.rates).predicted
        predicted = self._predicted(self.least, replace(predicted, overhead_seconds=self.overhead(self.least)))
        if predicted.needed_nbytes > room:
            return None
        return joint.Joint(self.least, predicted, "smallest", 0.0, time.perf_counter() - began)

    def _predicted(self, lives: tuple[Life, ...], predicted: Prediction) -> Prediction:
        """With what codecs allocate, and what the device reserves."""
        peak = peak_nbytes(self.graph, lives)
        reserved = self.reserve(lives) + peak - predicted.peak_nbytes if self.reserve is not None else 0
        return replace(predicted, peak_nbytes=peak, reserved_nbytes=reserved)
