"""Note the rest of a backward, after autograd has released all that the observed forward saved, as one op without tensors.

If a model is called many times before one backward, one call is observed, and its part of the backward is short. The rest
belongs to the other calls. No plan of the observed call changes it, and noting each of its ops takes several times as long as
running them. The allocator's counter shows what all of them together take, and what they leave.
"""

from __future__ import annotations

from contextlib import ExitStack

from lightning_memopt.trace.backwards import backward_runs
from lightning_memopt.trace.tracer import Tracer
from lightning_memopt.trace.unrecorded import made_unseen

_NAME = "backward of other calls"


class Rest:
    """Decides which ops are part of the rest of a backward."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._op = ExitStack()
        self._is_under_way = False

    def takes(self) -> bool:
        """Whether the op that is about to run is part of the rest, and so is not noted."""
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
