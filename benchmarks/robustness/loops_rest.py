"""What rests in the steps of a training script, and whether it moves: optimizer state, gradients and frozen weights.

Bytes are of the sessions that may park. *Unknown* is what is on the device and no plan was ever offered to park; *missing* is
what the plans in force park, and what is on the device nevertheless.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan
from lightning_memopt.record import parameters_of
from lightning_memopt.runtime.state_copies import parkable
from lightning_memopt.runtime.state_dicts import ParkedState
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.session import parked_states, parked_weights
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.parked_states import StatesAtRest
from lightning_memopt.session.parked_weights import WeightsAtRest
from lightning_memopt.torch_private import backward_task


class Resting:
    """All sessions of a run. Enter `doors` around it."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[StatesAtRest] = weakref.WeakSet()
        self._gradients: weakref.WeakKeyDictionary[StatesAtRest, set[str]] = weakref.WeakKeyDictionary()
        """Names of parameters whose gradients a plan was offered, or which it may update early."""
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
        """Paths of modules whose frozen weights a plan was offered."""
        self._running: list[Plan] = []
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def doors(self) -> Iterator[None]:
        """Watch what the package does, at the functions through which it is asked."""
        between = StatesAtRest.between_steps
        begins = StatesAtRest.update_begins
        found = StatesAtRest.found
        found_weights = WeightsAtRest.found

        def is_between(states: StatesAtRest, state: object) -> None:
            if states.offloading.tier:
                self._sessions.add(states)
            between(states, state)

        def updates(states: StatesAtRest, optimizer: torch.optim.Optimizer, own: bool, closure: bool) -> None:
            if states.offloading.tier and backward_task() == -1:  # in a backward, the gradient goes at once
                self._update(states, optimizer)
            begins(states, optimizer, own, closure)

        def finds(states: StatesAtRest, graph: Graph, timed: bool = True) -> Any:
            result = found(states, graph, timed)
            known = self._gradients.setdefault(states, set())
            known |= {graph.tensors[update.parameter].name for update in graph.updates}
            known |= {state.parking.parameter for state in result if state.parking.what == "gradient"}
            return result

        def finds_weights(weights: WeightsAtRest, graph: Graph, timed: bool = True) -> Any:
            result = found_weights(weights, graph, timed)
            self._units.setdefault(weights.model, set()).update(unit.parking.module for unit in result)
            return result

        with (
            mock.patch.object(StatesAtRest, "between_steps", is_between),
            mock.patch.object(StatesAtRest, "update_begins", updates),
            mock.patch.object(StatesAtRest, "found", finds),
            mock.patch.object(WeightsAtRest, "found", finds_weights),
        ):
            yield

    def round_began(self, state: object) -> None:
        """A forward under a plan of this state begins, if it has one."""
        if isinstance(state, Running):
            self._running.append(state.plan)

    def _update(self, states: StatesAtRest, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for name, p in states.model.named_parameters()}
        planned = {s.parameter for plan in self._running for s in plan.states if s.what == "gradient"}
        for p in parameters_of(optimizer):
            if p.grad is None or p.grad.nbytes < parked_states.LEAST_NBYTES:
                continue
            name, known = names.get(id(p), ""), self._gradients.get(states, set())
            if p.grad.layout is torch.strided and is_away(p.grad):
                self._counts["gradients_away"] += p.grad.nbytes
            else:
                self._counts["gradients_unknown"] += p.grad.nbytes * (name not in known)
                self._counts["gradients_missing"] += p.grad.nbytes * (name in planned)

    def step(self, plans: Iterable[Plan]) -> dict[str, int]:
        """The step is over in which these plans were in force: bytes by name, those of `RESTS` (loops_judge.py)."""
        plans = tuple(plans)
        updated = tuple(self._updated())
        counts = self._counts | self._frozen(plans)
        names = [f"{what}_{how}" for what in ("gradients", "weights") for how in ("away", "unknown", "missing")]
        self._counts = Counter()
        self._running.clear()
        return {
            "parked": max((_parked(plan, "state") for plan in plans), default=0),
            "parkable": sum(sum(parkable(optimizer, p)) for optimizer, p in updated),
            "away": sum(_away(optimizer, p) for optimizer, p in updated),
            "gradients_parked": max((_parked(plan, "gradient") for plan in plans), default=0),
            "weights_parked": max((sum(unit.nbytes for unit in plan.weights) for plan in plans), default=0),
        } | {name: counts[name] for name in names}

    def _frozen(self, plans: Iterable[Plan]) -> Counter[str]:
        """The frozen weights between two steps."""
        counts: Counter[str] = Counter()
        planned = {unit.module for plan in plans for unit in plan.weights}
        for model in {id(states.model): states.model for states in self._sessions}.values():
            offered = self._units.get(model, set())
            for name, p in model.named_parameters():
                if is_away(p):
                    counts["weights_away"] += p.nbytes
                elif not p.requires_grad:
                    counts["weights_unknown"] += p.nbytes * (not _is_in(name, offered))
                    counts["weights_missing"] += p.nbytes * _is_in(name, planned)
        if counts["weights_unknown"] < parked_weights.LEAST_NBYTES:
            counts["weights_unknown"] = 0
        return counts

    def _updated(self) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
        """Each optimizer of a session that may park state, with each of its parameters."""
        for optimizer in {id(each): each for states in self._sessions for each in states.optimizers}.values():
            yield from ((optimizer, p) for p in parameters_of(optimizer))


def _is_in(name: str, paths: Iterable[str]) -> bool:
    """Whether the parameter of this name is one of a module with one of these paths."""
    return any(not path or name.startswith(f"{path}.") for path in paths)


def _parked(plan: Plan, what: str) -> int:
    """Bytes of state or of gradients that this plan parks."""
    return sum(state.nbytes for state in plan.states if state.what == what)


def _away(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    """Bytes of this parameter's state that are in a tier."""
    state = optimizer.state.get(p)
    return sum(stored.nbytes for stored in state.away.values()) if type(state) is ParkedState else 0
