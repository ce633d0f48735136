"""What the engine remembers of the forwards under a plan. The plan itself never changes."""

from __future__ import annotations

import weakref

from torch import nn

from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.runtime.engine.templates import Templates

Spans = dict[int, tuple[nn.Module, tuple[int, int]]]
"""Identity of a module -> (the module, its entry in `Program.quiet`)."""


class Learned:
    """What is known of the forwards of one signature under a program.

    program: the program.
    sized: a recorded tensor is matched only to a tensor of the graph with its size. False for a signature that borrows the plan
        of a larger batch.
    templates: the templates of the ops of these forwards.
    """

    def __init__(self, program: Program, sized: bool = True) -> None:
        self.program = program
        self.sized = sized
        self.templates = Templates(len(program.graph.forward))
        self._spans: tuple[weakref.ref[nn.Module], Spans] | None = None

    def fits(self, nbytes: int, tensor: int) -> bool:
        """Whether a storage of `nbytes` may be matched to this tensor of the graph."""
        planned = self.program.graph.tensors[tensor]
        if nbytes == planned.nbytes or tensor in self.program.sized_by_data:
            return True
        return not self.sized and planned.kind not in ("parameter", "buffer")

    def spans_of(self, model: nn.Module) -> Spans:
        """`Program.quiet`, by the identity of this model's modules. It is cached: a step has no time to visit all modules."""
        if self._spans is None or self._spans[0]() is not model:
            quiet = self.program.quiet
            spans = {id(m): (m, quiet[name]) for name, m in model.named_modules() if name in quiet}
            self._spans = (weakref.ref(model), spans)
        return self._spans[1]
