"""The step that a session is observing. A thread observes one step at a time; a step that leads to no graph is given up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_memopt.config import ONLY_OBSERVED, MemOptConfig
from lightning_memopt.device.places import is_on
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.record import Recorder
from lightning_memopt.session.forward.recording import Recording
from lightning_memopt.session.observe.accumulated import Kept
from lightning_memopt.session.observe.effort import Effort
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.observing import Observing, Waiting
from lightning_memopt.session.observe.silence import BLOCKED, GIVEN_UP, SLOW, Silence
from lightning_memopt.session.observe.workspaces import take_workspaces
from lightning_memopt.torch_private import current_mode, current_modes
from lightning_memopt.units import format_nbytes

_ANNOUNCED = 4
"""Maximum number of lines in a run that announce observed steps: there may be a state for each of many shapes."""
_IDLE = 3
"""Number of forwards in evaluation after which an observed step is given up."""


class ObservedStep:
    """The step that is being observed.

    now: its observation, None while no step is observed.
    effort: how much may be observed.
    overwritten: identities of the storages that ops of observed steps wrote to.
    kept: the gradients of observed steps that cannot be parked.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], config: MemOptConfig, effort: Effort) -> None:
        self.now: Observation | None = None
        self.effort = effort
        self.overwritten: set[int] = set()
        self.kept = Kept()
        self._model = model
        self._optimizers = optimizers
        self._config = config
        self._opaque_ops: dict[str, str] = {}  # ops that gave other bits when they ran again, in any observed step
        self._idle = self._announced = 0

    def announce(self, state: Observing, device: torch.device, budget_nbytes: int | None, say: Say) -> None:
        """Say how many steps of this state are observed: once for a state, and for the first states of the run."""
        if state.announced or self._announced == _ANNOUNCED:
            return
        state.announced = True
        self._announced += 1
        steps = "1 step" if state.steps == 1 else f"{state.steps} steps"
        within = f" within {format_nbytes(budget_nbytes)}" if budget_nbytes else ""
        last = "; later ones, for batches of other shapes, are not announced" if self._announced == _ANNOUNCED else ""
        say(f"MemOpt: observing {steps} on {device}{within}{last}")
        others = sorted({str(p.device) for p in self._model.parameters() if not is_on(device, p.device)})
        if others and self._announced == 1:
            say(
                f"MemOpt: parameters are on {', '.join(others)} as well. The budget is that of {device}, and nothing is "
                "planned elsewhere. Put the model on one device to plan all of it."
            )

    def begin(
        self,
        state: Observing | Waiting,
        device: torch.device,
        limit_nbytes: int | None,
        park_more: Callable[[], int] | None = None,
    ) -> Observation:
        """A step of this state begins to be observed. `park_more`: see `Observation`; None if no plan parks what rests."""
        take_workspaces(self._model, device)
        verify = meter = False
        fixed: frozenset[int] = frozenset()
        if isinstance(state, Observing):
            # all are metered: the plan may be made of any of them (`common` in graphs.py)
            verify, meter, fixed = self._config.verify and not state.graphs and not state.early_known, True, state.fixed
        self.effort.begins()
        early = isinstance(state, Observing) and (state.for_early or state.early_known)
        self.now = Observation(
            self._model,
            self._optimizers,
            device,
            limit_nbytes,
            verify,
            meter,
            fixed,
            self._opaque_ops,
            self._config.recompute,
            one_of_many=self.effort.looks_at_last and not early,
            overwritten=self.overwritten,
            gradients=self.kept if park_more or self._config.profile_steps >= ONLY_OBSERVED else None,
            park_more=park_more or int,
        )
        return self.now

    def passes_over(self, silence: Silence) -> bool:
        """Whether the forward that begins is not observed; `silence` is told why. Counts it."""
        looks = self.effort.looks_at(piles=self.now is not None and self.now.is_held)
        if self.now is not None:
            if not looks:
                self.now.abandon()  # a later forward of this step may be observed
            return not looks
        if observing():  # a step of another model (a GAN's generator and discriminator): this one must wait
            silence.forward(False, BLOCKED)
            return True
        if looks and not self.effort.is_due():
            silence.forward(False, SLOW)
            return True
        return not looks or self.effort.rests()

    def overtaken(self) -> None:
        """A forward of another signature begins before the observed one has had a backward."""
        self.effort.pile += self.now is not None and self.now.is_held
        self.abandon()

    def trains(self) -> None:
        """A forward of training begins."""
        self._idle = 0

    def evaluates(self, silence: Silence) -> None:
        """A forward of evaluation begins. After more than `_IDLE` of them in a row, the observed step is given up."""
        if self.now is not None:
            self._idle += 1
            if self._idle > _IDLE:
                self.abandon(silence)

    def finish(self) -> Graph | None:
        """The step has ended. Returns its graph; None without a forward or a backward (`training_step` gave None)."""
        try:
            graph = self.now.finish() if self.now is not None and self.has_backward else None
        finally:
            self.abandon()
        if graph is None or all(op.phase != "backward" for op in graph.ops):
            return None
        self.effort.succeeded()
        return graph

    def goes_on(self) -> Recording | None:
        """The model is called again: see `Observation.goes_on`."""
        return None if self.now is None else self.now.goes_on()

    @property
    def has_backward(self) -> bool:
        """Whether a backward of the observed forward was seen."""
        return self.now is not None and self.now.has_backward

    def step_ended(self, say: Say) -> None:
        """A step is over, observed or not."""
        forwards = self.effort.step_ended()
        if forwards:
            say(
                f"MemOpt: backwards run between {forwards} forwards of a step whose graphs are all held: the plan is made for "
                "the last forward, and takes the bytes of the others as they are"
            )

    def stop_metering(self) -> None:
        if self.now is not None:
            self.now.stop_metering()

    def update_ended(self) -> None:
        """An optimizer's update is over."""
        if self.now is not None:
            self.now.update_ended()

    def abandon(self, silence: Silence | None = None) -> None:
        """Stop observing this step. `silence` counts it as given up; None where the step is over."""
        now, self.now = self.now, None
        if now is not None:
            if silence is not None:
                silence.missed(GIVEN_UP)
            now.abandon()
            self.effort.evicts = self.effort.evicts or now.evicted
            self.effort.ends()


def observing() -> bool:
    """Whether any session observes a step in this thread."""
    take_off()
    return any(type(mode) is Recorder for mode in current_modes())


def take_off() -> None:
    """Leave modes whose step is over. When backward ends, autograd restores the modes that were on when it began, even a mode
    that was left meanwhile because a hook raised.
    """
    while (top := current_mode()) is not None and type(top) is Recorder and top.observer is None:
        top.leave()
