"""Which tensors a session may park in which forms, the rates of this machine's links and codecs, and the depots.

Nothing is measured or allocated before a plan is solved for a budget that the unmodified step exceeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import is_here, on_host
from lightning_memopt.errors import BudgetError, ConfigError
from lightning_memopt.graph import BEFORE, Graph, unmodified_levels
from lightning_memopt.plan import Plan
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.tiers import Limits
from lightning_memopt.ranks import size_here
from lightning_memopt.runtime.codecs import NAMES, Codec, codec
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.tiers.room import left_nbytes, taken_nbytes, total_nbytes
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.session import times
from lightning_memopt.session.observe import costs
from lightning_memopt.session.observe.saved_readers import bears_errors, needs
from lightning_memopt.session.parking.depots import Depots
from lightning_memopt.session.parking.joint_frontier import JointFrontier
from lightning_memopt.session.parts import Part
from lightning_memopt.solvers import joint
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.trace.link import measure
from lightning_memopt.units import AUTO_FRACTION

LOSSY = "block8"
"""The codec that compress="lossy" stands for."""
_PROBE_NBYTES = 8 << 20
_LEAST_PROBE_NBYTES = 1 << 14
"""Copies of fewer bytes tell nothing of the rates."""


class Offloading(Part):
    """The tensors that a session may park, and their forms (see the module).

    tier: the name of the tier; "" without offload.
    codec: the name of the codec that the config asks for; "" without one.
    depots: the depots of the plans in force.
    room_nbytes: the bytes that measuring copies may take on the device; None: as many as it likes.
    rests_nbytes: the bytes of the tier that are meant for what rests, while a step is solved for in which that is parked.
    """

    def __init__(self, device: torch.device, config: MemOptConfig) -> None:
        self.config = config
        self.room_nbytes: int | None = None
        self.rests_nbytes = 0
        self._elsewhere_nbytes = 0
        self._on(device)

    def moved(self, device: torch.device) -> None:
        """The model is on another device now."""
        self.close()
        vars(self).pop("rates", None)
        self._on(device)
        self.look_for_room()

    def _on(self, device: torch.device) -> None:
        config, self.device = self.config, device
        name, directory = config.offload_to
        shared = self.shares_memory if name in ("auto", "host") else False
        self.tier = {"none": "", "auto": "" if shared else "host"}.get(name, name)
        if self.tier == "host" and shared:
            where = "on the CPU" if on_host(device) else f"on {device}, which computes in it"
            raise ConfigError(f"offload='host' parks in the memory that the budget counts; {where}, use 'disk'.")
        self.codec = {"lossy": LOSSY, "none": "", "lossless": ""}.get(config.compress, config.compress)
        self.depots = Depots(device, directory)

    @property
    def shares_memory(self) -> bool:
        """Whether the device computes in the host's memory."""
        return on_host(self.device) or (is_here(self.device) and backend_of(self.device).shares_memory)

    def check(self, say: Callable[[str], None]) -> None:
        """Before anything runs: raise OffloadError where the directory of the disk tier cannot be used, and BudgetError for a
        budget of the tier that it does not have. `say`: tells the user why offload="auto" parks nothing.
        """
        if self.config.offload == "auto" and not self.tier and not on_host(self.device):
            say(f"MemOpt: nothing is offloaded: {self.device} computes in the host's memory. For a disk, set offload='disk'")
        if self.tier == "disk":
            Scratch(0, self.depots.directory).close()
        self.look_for_room()

    # -- how much the tier holds -------------------------------------------------------------------

    def look_for_room(self, own_nbytes: int = 0) -> None:
        """See how many bytes the tier may take in this process from now on: its budget, or its share of what the machine has
        left. `own_nbytes`: what this session has there beside its depots.
        """
        if self.tier:
            left, budget, taken = self._left_nbytes(), self._budget_nbytes(), taken_nbytes(self.tier)
            share = int(AUTO_FRACTION * (taken + (left - taken) // size_here()))
            self.depots.limit_nbytes = share if budget is None else min(budget, left)
            self._elsewhere_nbytes = max(0, taken_nbytes(self.tier) - own_nbytes - self.depots.nbytes)

    def _left_nbytes(self) -> int:
        """Bytes that the machine has for the tier: those that this process has there, and those that are left."""
        return taken_nbytes(self.tier) + left_nbytes(self.tier, self.depots.directory)

    def _budget_nbytes(self) -> int | None:
        nbytes = self.config.tier_budget_nbytes(self.tier, total_nbytes(self.tier, self.depots.directory))
        if nbytes is not None and nbytes < _LEAST_PROBE_NBYTES:
            raise BudgetError(
                f"{self.tier}_budget is {nbytes} bytes, and to measure copies alone takes {_LEAST_PROBE_NBYTES}; give more, or "
                "set offload='none'"
            )
        return nbytes

    @property
    def limit_nbytes(self) -> int | None:
        """The most bytes of the tier that plans of this session may take; None if no limit is known."""
        limit = self.depots.limit_nbytes
        return None if limit is None or not self.tier else max(0, limit - self._elsewhere_nbytes)

    @property
    def limits(self) -> Limits:
        """The most bytes that saved tensors may take in the tier."""
        limit = self.limit_nbytes
        return {} if limit is None else {self.tier: max(0, limit - self.rests_nbytes)}

    @contextlib.contextmanager
    def beside(self, rests_nbytes: int) -> Iterator[None]:
        """Within, plans are made for steps in which what rests takes so many bytes of the tier."""
        before, self.rests_nbytes = self.rests_nbytes, rests_nbytes
        try:
            yield
        finally:
            self.rests_nbytes = before

    def more_helps(self, nbytes: int) -> bool:
        """Whether the machine has so many bytes for the tier, so that only its budget is too small for them."""
        return nbytes <= self._left_nbytes() - self._elsewhere_nbytes

    # -- what may be parked ------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether anything may be parked."""
        return bool(self.tier) or self.config.compress != "none"

    @property
    def _gated(self) -> str:
        """The form of the codec for results of ReLU, in which values above 0 stay above 0; "" if the codec has no such form."""
        return self.codec.replace("block", "gated") if self.codec.startswith("block") else ""

    @cached_property
    def rates(self) -> MachineRates:
        """The rates of the tier and of the codecs, measured once, in less than a second."""
        return times.current.of_transfers(self._measured)

    @property
    def measured(self) -> MachineRates | None:
        """The rates if they were needed; else None, without measuring anything."""
        rates: MachineRates | None = vars(self).get("rates")
        return rates

    def measures_after(self, graph: Graph) -> None:
        """Copies are measured at the end of this step, if at all, and take no more than the step itself."""
        levels = unmodified_levels(graph)
        self.room_nbytes = max(levels, default=0) - levels[-1] if levels else None

    def _measured(self) -> MachineRates:
        used = {"bools", "positive", self.codec, self._gated} & set(NAMES) if self.config.compress != "none" else set()
        most = _PROBE_NBYTES if self.room_nbytes is None else self.room_nbytes // 2  # a copy has a source and a target
        limit = self.depots.limit_nbytes
        left = _PROBE_NBYTES if limit is None else limit - taken_nbytes(self.tier)
        probe_nbytes = min(_PROBE_NBYTES, max(_LEAST_PROBE_NBYTES, min(most, left)))
        codecs = [codec(name) for name in sorted(used)]
        try:
            return self._measured_by(probe_nbytes, codecs)
        except torch.OutOfMemoryError:  # the step has had its memory in other pieces
            return self._measured_by(_LEAST_PROBE_NBYTES, codecs)

    def _measured_by(self, probe_nbytes: int, codecs: list[Codec]) -> MachineRates:
        """Raises torch.OutOfMemoryError where the device has no room for the bytes that are copied."""
        tiers = [self.depots.probe(self.tier, probe_nbytes)] if self.tier else []
        try:
            return costs.in_own_thread(lambda: measure(tiers, self.device, codecs), self.device)
        finally:
            for tier in tiers:
                tier.close()

    def forms(self, graph: Graph) -> dict[int, list[joint.Form]]:
        """The forms in which each tensor of the forward may be parked."""
        forms: dict[int, list[joint.Form]] = {}
        for op in graph.forward:
            for t in op.outputs:
                tensor = graph.tensors[t]
                if tensor.nbytes < LEAST_NBYTES or tensor.born_at == BEFORE:
                    continue
                forms[t] = codes = self._codes(graph, t)
                if self.tier:
                    forms[t] = [(self.tier, tensor.nbytes), *codes, *((f"{code}@{self.tier}", n) for code, n in codes)]
        return forms

    def _codes(self, graph: Graph, t: int) -> list[joint.Form]:
        """The codecs in which a tensor may be parked: lossless ones that suit backward, or the one that the config asks for."""
        tensor = graph.tensors[t]
        if self.config.compress == "none" or not tensor.dtype:
            return []
        dtype, names = getattr(torch, tensor.dtype), []
        if dtype is torch.bool:
            names.append("bools")
        elif (rectified := graph.producers[t].name.startswith("aten::relu")) and needs(graph, t) <= {"sign", "shape"}:
            names.append("positive")
        elif self.codec and bears_errors(graph, t):
            names.append(self.codec)
        elif rectified and self._gated and bears_errors(graph, t, gated=True):
            names.append(self._gated)
        accepted = (codec(name) for name in names)
        return [(c.name, c.encoded_nbytes(tensor.size, dtype)) for c in accepted if c.accepts(tensor.size, dtype)]

    def widened(self, frontier: Frontier) -> Frontier:
        """The frontier, widened by plans that park tensors where any may be parked."""
        return JointFrontier.of(frontier, self) if self.wanted else frontier

    def depot_of(self, plan: Plan, in_force: Callable[[], Iterable[Plan]] | None = None) -> Depot | None:
        """See `Depots.of`."""
        return self.depots.of(plan, in_force)

    def close(self) -> None:
        """Close all tiers, as soon as nothing is parked there."""
        self.depots.close()
