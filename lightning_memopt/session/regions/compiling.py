"""`compile=True`: the model's repeated blocks are compiled for the time of the run.

Blocks of the same class share their code, so a transformer compiles one block, not all of them. What is around the blocks stays
eager, and is planned as eager code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.record import compiled_modules
from lightning_memopt.session.parts import Part


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that a list or sequence of the model has several of: same class, with modules of their own."""
    blocks: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        children = list(module.children())
        several = Counter(map(type, children)) if isinstance(module, nn.ModuleList | nn.Sequential) else Counter()
        for child in children:
            if several[type(child)] > 1 and next(child.children(), None) is not None:
                blocks[id(child)] = child
            else:
                waiting.append(child)
    return list(blocks.values())


class CompiledBlocks(Part):
    """The modules that a run compiles where its config says so. `close` makes them eager again."""

    def __init__(self, config: MemOptConfig, say: Callable[[str], None]) -> None:
        self._wanted, self._say = config.compile, say
        self._compiled: list[nn.Module] = []

    def compile(self, model: nn.Module) -> None:
        """Compile the repeated blocks, or else the whole model. A model that is compiled already stays as it is."""
        if not self._wanted:
            return
        if compiled_modules(model):
            self._say("MemOpt: the model is compiled already: compile=True compiles nothing more")
            return
        blocks = repeated_blocks(model)
        kinds = ", ".join(f"{n} {kind.__name__}" for kind, n in Counter(map(type, blocks)).items())
        self._say(f"MemOpt: compiling {kinds or 'the whole model, which has no repeated blocks'}")
        for module in blocks or [model]:
            self._compiled.append(module)
            module.compile()

    def close(self) -> None:
        """The run is over: the modules run eagerly again."""
        while self._compiled:
            self._compiled.pop()._compiled_call_impl = None
