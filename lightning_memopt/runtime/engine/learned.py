"""What the steps under a plan teach, apart from the plan itself, which never changes."""

from __future__ import annotations

import weakref

from torch import nn

from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.runtime.engine.templates import Templates

Spans = dict[int, tuple[nn.Module, tuple[int, int]]]


class Learned:
    """What is known of the forwards of one signature under a program.

    program: what they follow.
    sized: only tensors of the graph's sizes are its tensors. Not so for a signature that borrows the plan of a larger batch.
    templates: what their ops looked like.
    """

    def __init__(self, program: Program, sized: bool = True) -> None:
        self.program = program
        self.sized = sized
        self.templates = Templates(len(program.graph.forward))
        self._spans: tuple[weakref.ref[nn.Module], Spans] | None = None

    def fits(self, nbytes: int, tensor: int) -> bool:
        """Whether a storage of this size may be the graph's tensor."""
        planned = self.program.graph.tensors[tensor]
        if nbytes == planned.nbytes or tensor in self.program.sized_by_data:
            return True
        return not self.sized and planned.kind not in ("parameter", "buffer")

    def spans_of(self, model: nn.Module) -> Spans:
        """`Program.quiet`, by the identity of this model's modules. Remembered: a step must not walk its modules."""
        if self._spans is None or self._spans[0]() is not model:
            quiet = self.program.quiet
            spans = {id(m): (m, quiet[name]) for name, m in model.named_modules() if name in quiet}
            self._spans = (weakref.ref(model), spans)
        return self._spans[1]
