"""When a step of a session is over: after the optimizers of its model have updated, or after an update written by hand."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lightning_memopt.record import is_plain, storage_id, updates_any
from lightning_memopt.runtime import Engine
from lightning_memopt.session.observe.observation import Observation


class Ends:
    """The updates of one step.

    Of several optimizers, only those that have parameters of the model delimit its steps. The update of another model (a GAN's
    discriminator) between forward and backward is part of the step. Where no optimizer has any of the parameters (they keep
    copies of their own), all of them delimit.

    by_hand: the last step was ended by an update without an optimizer.
    turn: the number of the optimizer that updated last; before any has, that of the last one.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.by_hand = False
        self.turn = len(optimizers) - 1
        self._owners: set[int] = set()
        self._updated: set[int] = set()
        self._before: list[tuple[int, int]] = []
        self._planned: weakref.ref[Engine] | None = None

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer delimits steps."""
        if len(self.optimizers) < 2 or id(optimizer) in self._owners:
            return True
        trained = set(map(id, self.model.parameters()))
        known = {id(o): o for o in (*self.optimizers, optimizer)}
        owners = {key for key, o in known.items() if updates_any(o, trained)}
        self._owners = owners or set(known)
        return id(optimizer) in self._owners

    def updated(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer that delimits steps has updated. Returns whether all of them have."""
        self.by_hand = False
        self._updated.add(id(optimizer))
        over = True
        for i, o in enumerate(self.optimizers):
            if o is optimizer:
                self.turn = i
            over = over and (id(o) in self._updated or bool(self._owners and id(o) not in self._owners))
        return over

    @property
    def awaited(self) -> bool:
        """Whether an optimizer has updated: then the next forward ends the step."""
        return bool(self._updated)

    def written_by_hand(self, observation: Observation | None) -> bool:
        """Before a forward: whether the parameters were updated without an optimizer since the last forward.

        Where the step is not observed, they count as updated if they were so in the last observed step and backward is over.
        """
        if observation is not None:
            written = observation.has_backward and (observation.written or self._before != self._memory())
            self.by_hand = self.by_hand or written
            return written
        return self.by_hand and (self._planned is None or self._planned() is None)

    def observing(self) -> None:
        """An observed forward begins."""
        self._before, self._planned = self._memory(), None

    def planned(self, engine: Engine | None) -> None:
        """A planned forward begins; its engine, where it has one, lives until its backward is over."""
        self._planned = None if engine is None else weakref.ref(engine)

    def _memory(self) -> list[tuple[int, int]]:
        """The ids of the parameters and of their storages: `p.data = p.data - gradient` runs no op that writes."""
        return [(id(p), storage_id(p)) for p in self.model.parameters() if is_plain(p)]

    def clear(self) -> None:
        self._updated.clear()
