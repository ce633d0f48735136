"""Process-wide changes of an open session: they are undone when the session closes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lightning_memopt.device.places import on_host
from lightning_memopt.errors import AlreadyAttachedError
from lightning_memopt.record import drop_seams, interrupts, keep_seams
from lightning_memopt.record.gathered import settling, units_of
from lightning_memopt.runtime import install_native
from lightning_memopt.session.observe.observed_step import take_off
from lightning_memopt.trace import counting_all

_attached: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()
"""The attachment of each model, by the model's id: a model has at most one open session, whichever adapter opened it."""


def has_run(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer belongs to an open session."""
    return any(optimizer is o for attachment in _attached.values() for o in attachment._optimizers)


class Attachment:
    """The process-wide changes of one session, from its construction until `leave`.

    Raises AlreadyAttachedError where the model has an open session.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device, say: Callable[[str], None]
    ) -> None:
        if id(model) in _attached:
            raise AlreadyAttachedError(
                "This model is in another run already. Leave that one first: end its optimize() block or its Trainer's fit."
            )
        self._model, self._optimizers = id(model), optimizers
        self._contexts = contextlib.ExitStack()
        _attached[self._model] = self
        keep_seams(self)
        if units_of(model):
            self._contexts.enter_context(settling())
        if on_host(device):
            self._contexts.enter_context(counting_all(say))
        install_native(say)
        interrupts.watch(self)  # last: only `leave` ends it

    def others(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the other open sessions: their gradients and state are on the device, too."""
        return [optimizer for other in _attached.values() if other is not self for optimizer in other._optimizers]

    def leave(self) -> None:
        """Undo all changes, and raise an exception that a destructor could not raise. May be called again."""
        if _attached.get(self._model) is not self:
            return
        take_off()
        self._contexts.close()
        interrupts.unwatch(self)
        drop_seams(self)
        del _attached[self._model]
        interrupts.settle()
