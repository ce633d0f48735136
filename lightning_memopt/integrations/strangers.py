"""Notice steps of optimizers that a run was not given: a warm restart, the next fold, a copy of the model."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter

import torch
from torch import nn

from lightning_memopt.record import parameters_of, uncompiled, updates_any
from lightning_memopt.session import Session
from lightning_memopt.session.attachment import has_run

IN_A_ROW = 4
"""Number of steps of strangers in a row after which these strangers replace the run's own optimizers."""
ELSEWHERE = 10
"""Number of steps of strangers that train no parameter of the model, without a call of the model, after which the run says
so.
"""


class Strangers:
    """Decides whether an optimizer that steps belongs to the run.

    Otherwise, if user code replaces its optimizer, the steps of the run would never end: nothing would be measured, and the
    state of the new optimizer would not be counted.
    """

    def __init__(self, session: Session, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """`optimizers`: those of the run. The list is changed in place."""
        self._session, self._model, self._optimizers = session, model, optimizers
        self._in_a_row: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._elsewhere, self._said = 0, False

    @uncompiled
    def called(self) -> None:
        """The model is called."""
        self._elsewhere = 0

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Before a step: whether it is one of the run. Raises UpdatesInBackwardError if a stranger steps after the run's own
        optimizer has updated parameters in backward.
        """
        if id(optimizer) in map(id, self._optimizers):
            if self._in_a_row:
                self._in_a_row.clear()
            self._elsewhere = 0
            return True
        trained = set(map(id, self._model.parameters()))
        if not updates_any(optimizer, trained):
            self._trains_elsewhere(optimizer)
            return False
        self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        strangers = list(self._in_a_row) if self._in_a_row[optimizer] >= IN_A_ROW else []
        self._session.trained_by(strangers)
        if strangers:
            names = ", ".join(type(o).__name__ for o in strangers)
            self._session.say(f"MemOpt: {names}, which this run was not given, trains its model now; observing again")
            self._optimizers[:] = strangers
            self._in_a_row.clear()
        return bool(strangers)

    def _trains_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        if self._said or has_run(optimizer):
            return
        if self._session.plan is None and self._trains_copy(optimizer):
            self._session.silence.copy_trained()
            return
        self._elsewhere += 1
        if self._elsewhere == ELSEWHERE:
            self._said = True
            warnings.warn(
                f"MemOpt: another model is trained: {ELSEWHERE} steps of {type(optimizer).__name__}, which has no parameter of "
                "this run's model, passed without a call of it. They are not within the budget. Open a run for the model "
                "that trains now.",
                stacklevel=2,
            )

    def _trains_copy(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has the parameters of a copy of the model: the same number, of the same shapes."""
        trained = [p.shape for p in self._model.parameters() if p.requires_grad]
        found = [p.shape for p in parameters_of(optimizer)]
        return len(found) == len(trained) and Counter(found) == Counter(trained)
