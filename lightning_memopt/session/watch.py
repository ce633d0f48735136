"""The step of a session that is being observed, if one is: one at a time in a thread, given up where nothing comes of it."""

from __future__ import annotations

import warnings

from lightning_memopt.graph import Graph
from lightning_memopt.session.observation import Observation, observing

_TURNS = 50
"""Forwards that wait for another model's observed step before a warning says so."""
_IDLE = 3
"""Forward passes in evaluation after which a step that began to be observed is given up."""


class Watch:
    """`now`: what is observed. `opaque_ops`: names of ops that gave other bits when they ran again, in any observed step."""

    def __init__(self) -> None:
        self.now: Observation | None = None
        self.opaque_ops: dict[str, str] = {}
        self._idle = self._turns = 0

    def blocked(self) -> bool:
        """Whether a step of another model is being observed (a GAN's generator and discriminator): one after the other."""
        if not observing():
            return False
        self._turns += 1
        if self._turns == _TURNS:
            warnings.warn(
                f"MemOpt: {_TURNS} forwards of this model ran as they are, because a step of another model is being observed "
                "and has not ended: does its optimizer step?",
                stacklevel=2,
            )
        return True

    def trains(self) -> None:
        """A forward of training begins."""
        self._idle = 0

    def evaluates(self) -> None:
        """A forward of evaluation begins: if there are but such, the step does not go on."""
        if self.now is not None:
            self._idle += 1
            if self._idle > _IDLE:
                self.abandon()

    def finish(self) -> Graph | None:
        """The step has ended: its graph; None without a forward, or where nothing came of it (`training_step` gave None)."""
        try:
            graph = self.now.finish() if self.now is not None else None
        finally:
            self.abandon()
        return graph if graph is not None and any(op.phase == "backward" for op in graph.ops) else None

    def abandon(self) -> None:
        now, self.now = self.now, None
        if now is not None:
            now.abandon()
