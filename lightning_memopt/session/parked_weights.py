"""Weights that a session parks, and that are on the device only while their module runs: which of them can be parked.

A weight that is away can be read (runtime/parked_weights.py). So weights stay away in observed steps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn, optim

from lightning_memopt.device.places import is_on, on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Once
from lightning_memopt.plan import WeightParking
from lightning_memopt.plan.weights import Unit, UnitOf, all_of, movable, read_units
from lightning_memopt.record import compiled_modules
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.runtime.parked import LEAST_NBYTES
from lightning_memopt.runtime.parked_weights import ParkedWeights, placed_in
from lightning_memopt.runtime.weight_memory import may_be_parked
from lightning_memopt.runtime.weight_units import weight_units
from lightning_memopt.session.measure.peak_meter import in_compiled_code
from lightning_memopt.session.parking.obstacles import obstacle
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.torch_private import storage_id
from lightning_memopt.units import format_nbytes

Say = Callable[[str], None]
_Now = tuple[tuple[str, ...], tuple[WeightParking, ...], list[tuple[int, int, bool]]]
"""What is parked, and the parameters that there were then: identities of each and its storage, and whether it was trained."""
_COMPILED = Reason("compiled code does not say when it reads them", "Train without torch.compile")


class WeightsAtRest(Part):
    """The weights of a session that its plans park.

    model, offloading: those of the session.
    parked: those that are parked now; None if none ever was.
    in_chunks: identities of the parameters that updates after backward take a few at a time: they can be parked, too.
    """

    def __init__(
        self,
        model: nn.Module,
        offloading: Offloading,
        alone: Callable[[], bool],
        say: Say,
        parts: Parts,
        written: AbstractSet[int],
    ) -> None:
        """`alone`, `parts`, `written`: see `AtRest`."""
        if offloading.tier:
            parts.add(self)
        self.model = model
        self.offloading = offloading
        self._alone = alone
        self._written = written
        self.in_chunks: Callable[[], AbstractSet[int]] = frozenset
        self._compiled_step = False
        self._say = say
        self._say_once = Once(say)
        self.parked = placed_in(model)
        self._placed = frozenset[str]() if self.parked is None else self.parked.paths  # before the run
        self._now: _Now = tuple(self._placed), (), []

    # -- moments of a step -------------------------------------------------------------------------

    def update_begins(self, optimizer: optim.Optimizer, own: bool, closure: bool) -> None:
        if self.parked is not None:
            self.parked.backward_ended()
            if own and in_compiled_code() and self.parked.trained:  # its step may have their addresses
                self._compiled_step = True
                paths, weights, _ = self._now
                self._now = (), (), []
                self._put(paths, weights)

    def planned_forward_begins(self, pass_fences: Callable[[], None]) -> None:
        """`pass_fences`: see `ParkedWeights.forward_begins`."""
        if self.parked is not None:
            self.parked.forward_begins(pass_fences)

    def put(self, weights: tuple[WeightParking, ...]) -> None:
        """These weights are parked from now on, and no others."""
        self._put(tuple(unit.module for unit in weights), weights)

    def put_modules(self, paths: tuple[str, ...]) -> None:
        """The weights of these modules are parked from now on, and no others. There is no plan yet."""
        self._put(paths, ())

    def park_more(self) -> int:
        """The device has no memory for an op of an observed step: park half of the weights that can be and are not yet. Returns
        their bytes in the tier.
        """
        units, before_nbytes = self.may_be_parked(), self.tier_nbytes
        there = [path for path in units if self.parked is None or path not in self.parked.paths]
        if there:
            self.put_modules((*self._now[0], *there[: (len(there) + 1) // 2]))
        left_nbytes = self.tier_nbytes - before_nbytes
        if left_nbytes > 0:
            self._say_once(
                f"MemOpt: an observed step has no memory left: weights leave the device ({format_nbytes(left_nbytes)} so far), "
                "and are there only while their module runs",
                "no memory",
            )
        return left_nbytes

    def _put(self, paths: tuple[str, ...], weights: tuple[WeightParking, ...]) -> None:
        now = [(id(p), storage_id(p), p.requires_grad) for p in self.model.parameters()] if paths else []
        if (paths, weights, now) == self._now:
            return
        self._now = paths, weights, now
        units = self._units() if paths else {}
        if self.parked is None:
            self.parked = ParkedWeights(self._say)
        wanted = {path: (self.model.get_submodule(path), list(units[path].values())) for path in paths if path in units}
        stays = [path for path in wanted if self.parked.has(path, *wanted[path])]
        self.parked.park_only(stays)
        try:
            for path in wanted:
                if path not in self.parked.paths:
                    depots = self.offloading.depots
                    depots.make_room(self.offloading.tier, sum(w.nbytes for w in wanted[path][1]))
                    self.parked.add(path, *wanted[path], depots.directory, depots.limit_nbytes)
        except OffloadError as error:
            self._say_once(f"MemOpt: weights that the plan parks stay on the device: {error}")
        self.parked.copy_ahead(weights)

    @property
    def tier_nbytes(self) -> int:
        """Bytes that parked weights take in the tier."""
        return 0 if self.parked is None else self.parked.tier_nbytes

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were fetched so far."""
        return 0 if self.parked is None else self.parked.moved_nbytes

    def close(self) -> None:
        if self.parked is None:
            return
        try:
            self.put_modules(tuple(self._placed))
        except torch.OutOfMemoryError:
            self._say_once(
                "MemOpt: weights stay in the tier, and are read there: the run is over, and the device has no room for all"
            )

    def tell_of_placed(self) -> None:
        """Tell if no plan of this run brings weights home that `to_device` has parked."""
        if self._placed and not self.offloading.tier:
            self._say(
                f"MemOpt: the weights of {len(self._placed)} modules stay parked, as to_device() left them, and no plan "
                f"counts on them: set offload='{'disk' if on_host(self.offloading.device) else 'host'}'"
            )

    # -- the plan ----------------------------------------------------------------------------------

    def found(self, graph: Graph, timed: bool = True) -> list[UnitOf]:
        """All weights that can be parked. `timed`: with the seconds of copies."""
        units = self.may_be_parked()
        if not units:
            return []
        can_move, _ = self._movable(graph, units)
        return all_of(graph, can_move, self.offloading.tier, self.offloading.rates if timed else None)

    def _movable(self, graph: Graph, units: dict[str, dict[str, torch.Tensor]]) -> tuple[list[Unit], dict[str, str]]:
        # the graph does not say it of writes through `weight.data`, and no version counter does
        written = {path for path, own in units.items() if any(storage_id(w) in self._written for w in own.values())}
        named = {path: {name: w.requires_grad for name, w in own.items()} for path, own in units.items() if path not in written}
        can_move, why = movable(graph, read_units(graph, named))
        return can_move, why | dict.fromkeys(written, "the step writes weights of their modules")

    def tell_of_others(self, graph: Graph) -> None:
        """A budget is missed, or the least is looked for: tell which weights cannot be parked, and why."""
        units = self.may_be_parked()
        can_move, why = self._movable(graph, units)
        known = {*why, *(unit.path for unit in can_move)}
        why |= dict.fromkeys(units.keys() - known, "their modules have weights that the step does not read")
        modules: dict[str, list[str]] = {}
        for path, reason in why.items():
            modules.setdefault(reason, []).append(path)
        for reason, paths in modules.items():
            weights = [w for path in paths for w in units[path].values()]
            self._stay(weights, f"{reason} ({', '.join(sorted(paths)[:3])}{', ...' if len(paths) > 3 else ''})")
        device = self.offloading.device
        others = [p for p in self._frozen_now() if is_on(device, p.device) and not may_be_parked(p)]
        if self.offloading.tier:
            self._stay(others, "other tensors or processes have their memory, too")

    def _stay(self, weights: Sequence[torch.Tensor], why: str) -> None:
        nbytes = sum(w.nbytes for w in weights)
        if nbytes >= LEAST_NBYTES:
            self._say_once(f"MemOpt: weights stay on the device ({format_nbytes(nbytes)}): {why}", why)

    def may_be_parked(self) -> dict[str, dict[str, torch.Tensor]]:
        """Path of a module -> its weights by name; nothing where none can be parked, and then a line says why."""
        units = self._units() if self.offloading.tier else {}
        if sum(w.nbytes for own in units.values() for w in own.values()) < LEAST_NBYTES:
            return {}
        reason = obstacle(self.offloading, self._alone()) or (_COMPILED if compiled_modules(self.model) else None)
        if reason is None:
            return units
        self._say_once(f"MemOpt: weights are not parked: {reason.what}. {reason.fix}.")
        return {}

    def _units(self) -> dict[str, dict[str, torch.Tensor]]:
        """Path of a module -> its weights by name."""
        return weight_units(self.model, self.offloading.device, set() if self._compiled_step else self.in_chunks())

    def _frozen_now(self) -> list[torch.Tensor]:
        return [p for p in self.model.parameters() if not p.requires_grad]
