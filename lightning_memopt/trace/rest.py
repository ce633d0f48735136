"""The rest of a backward, once autograd has let go of all that the observed forward saved: as one op without tensors.

Where a model is called again and again before one backward, one call is observed, and its part of the backward is short. What
follows belongs to the other calls. No plan of the observed call changes it, and noting each of its ops takes several times as
long as running them. The allocator's counter knows what all of them take, and what they leave.
"""

from __future__ import annotations

from contextlib import ExitStack

from lightning_memopt.trace.backwards import backward_runs
from lightning_memopt.trace.tracer import Tracer
from lightning_memopt.trace.unrecorded import made_unseen

_NAME = "backward of other calls"


class Rest:
    """Tells the ops that are part of the rest of a backward."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._op = ExitStack()
        self._is_under_way = False

    def takes(self) -> bool:
        """Whether the op that is about to run is part of it, and is not to be noted."""
        tracer = self._tracer
        if not self._is_under_way and not tracer.unreleased and tracer.phase == "backward" and backward_runs():
            self._is_under_way = True
            self._op.enter_context(made_unseen(tracer, _NAME))
        elif self._is_under_way and not backward_runs():
            self.end()
        return self._is_under_way

    def end(self) -> None:
        """The backward is over."""
        self._is_under_way = False
        self._op.close()
