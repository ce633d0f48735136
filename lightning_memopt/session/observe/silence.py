"""Warn once why steps lead to no plan, and what to write instead."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.device.backends import backend_of
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.session.forward.recording import hooks_allowed, in_checkpoint, others_hooks

WAITING = 4
"""Number of forwards without a plan, because of their shapes, after which a warning comes."""
FORWARDS = 20
"""Number of observed forwards, without a step that ends, after which a warning comes."""
COPIES = 10
"""Number of updates of copies of the model, without a forward under a plan, after which a warning comes."""

EVALUATION = Reason("the model is trained while it is in evaluation mode", "Call model.train() before the loop")
NO_HOOKS = Reason(
    "the model is called under torch.func, or where saved-tensor hooks are disabled", "Call it outside of that, model(x)"
)
CHECKPOINTED = Reason(
    "torch.utils.checkpoint is around the calls of the model, or of its modules, and runs each of them twice",
    "Call them without it: a plan decides what is rebuilt",
)
OTHER_HOOKS = Reason(
    "saved-tensor hooks of your own are around its call, and may change what is saved",
    "Enter them inside of the forward, around what they are for, or leave them out",
)
CAPTURED = Reason("the model is called while a CUDA graph is captured", "Train without capturing, or without a budget")
FORKED = Reason(
    "the model is trained in a process that was forked from that of its run, which has no part of the run's files",
    "Open a run in the process that trains",
)
BLOCKED = Reason(
    "a step of another model is being observed, and does not end", "See that the other model's optimizer steps as well"
)
GIVEN_UP = Reason(
    "every step that was observed was given up, because of an exception or an evaluation in the middle of it",
    "Evaluate after optimizer.step()",
)
SLOW = Reason(
    "its steps have been observed for more than 5 % of the run's time, and led to no plan that serves them all",
    "Train on without one, or with batches of fewer shapes; observing goes on when it is a small part of the run again",
)
WAITS = Reason(
    "its batches have ever new shapes, no plan in force serves them, and one for each would take longer than it saves",
    "Pad them to a few lengths, or sort them by length",
)
COPIED = Reason(
    "copies of the model are trained instead of it",
    "Train the model itself, and put its weights back by load_state_dict(), or open a run for each copy",
)
_UNCALLED = Reason(
    "the optimizer steps, and no call of the model or of a module in it is seen",
    "Write module(x) instead of module.forward(x), outside of compiled functions, or give optimize() the module that is called",
)
_NO_BACKWARD = Reason(
    "no backward was seen of its forwards",
    "Call backward() in the thread of the forward and before the next one, and forwards that need none under torch.no_grad()",
)
_NO_STEP = Reason(
    f"{FORWARDS} forwards and backwards ran and no optimizer of this run has stepped",
    "Wait for the first step, if it has more batches than that; else give optimize() the optimizer, or call run.step()",
)


def trains(model: nn.Module) -> bool:
    """Whether the model is in training mode. The mode of a DistributedDataParallel around it does not count: loops call `eval`
    and `train` of either.
    """
    while DistributedDataParallel in type(model).__mro__:  # not `isinstance`, which its base class makes slow
        model = cast(DistributedDataParallel, model).module
    return model.training


def gradients_are_recorded() -> bool:
    """Whether autograd records what runs now, and no compiler takes it in."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()


def unobservable(model: nn.Module, device: torch.device) -> Reason | None:
    """Why a forward with gradients can be neither observed nor planned now; None where it can."""
    if not trains(model):
        return EVALUATION
    if not hooks_allowed():
        return NO_HOOKS
    if others_hooks():
        return CHECKPOINTED if in_checkpoint() else OTHER_HOOKS
    return CAPTURED if backend_of(device).is_capturing() else None


class Silence:
    """Counts forwards and steps that pass without a plan and without an observed step.

    paused: steps are not counted.
    reason: why there is no plan; None where that is not known.
    """

    def __init__(self, profile_steps: int) -> None:
        self.paused = False
        self._process = os.getpid()
        self.reason: Reason | None = None
        self._most_steps = 2 * profile_steps
        self._steps = self._forwards = self._waited = 0
        self._backward = self._said = False
        self._missed: Counter[Reason] = Counter()

    def heard(self) -> None:
        """A step was observed to its end, or the state needs no observed step: counting begins again."""
        self._steps = self._forwards = 0
        self._backward = False
        self._missed.clear()
        self.reason = None

    def can_observe(self, model: nn.Module, device: torch.device) -> bool:
        """Whether a call of the model can be observed now; counts the calls that cannot."""
        why = FORKED if os.getpid() != self._process else unobservable(model, device)
        if why is not None:
            self.missed(why)
        return why is None

    def missed(self, reason: Reason) -> None:
        """A call of the model, or a step, could not be observed for this reason."""
        self._missed[reason] += 1

    def copy_trained(self) -> None:
        """A copy of the model is updated."""
        if not self.paused:
            self.missed(COPIED)
        if self._missed[COPIED] >= COPIES:
            self._say(COPIED)

    def forward(self, backward: bool, missed: Reason | None = None) -> None:
        """A forward begins while there is no plan. `backward`: the backward of an earlier forward was seen. `missed`: why the
        forward is not observed to make a plan; None where it is.
        """
        self._forwards += 1
        if missed is WAITS:
            self._waited += 1
        if missed is WAITS and self._waited == WAITING:
            warnings.warn(
                "MemOpt: batches of ever new shapes run without a plan: no plan in force serves them, and one for each would "
                f"take longer than it saves. Only eviction lowers their memory, and it is slower than a plan. {WAITS.fix}.",
                stacklevel=2,
            )
        self._backward = self._backward or backward
        if missed is not None:
            self.missed(missed)
        if self._forwards >= FORWARDS:
            self._say(self._most or (_NO_STEP if self._backward else _NO_BACKWARD))

    def step_ended(self) -> None:
        """A step is over that was not observed."""
        if not self.paused:
            self._steps += 1
        if self._steps >= self._most_steps:
            self._say(self._most or (_NO_BACKWARD if self._forwards else _UNCALLED))

    @property
    def _most(self) -> Reason | None:
        return max(self._missed, key=self._missed.__getitem__, default=None)

    def _say(self, reason: Reason) -> None:
        self.reason = reason
        if not self._said and reason is not WAITS:
            self._said = True
            warnings.warn(f"MemOpt: there is no plan yet, because {reason.what}. {reason.fix}.", stacklevel=2)
