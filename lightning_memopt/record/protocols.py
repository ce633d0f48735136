"""Who is told what the recorder sees. An `Owner` decides what becomes of every slot; an `Observer`, where there is one, watches
each op begin and end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from lightning_memopt.record.rules import Rule
from lightning_memopt.record.tape import Call, Slot


@dataclass(slots=True)
class OpRecord:
    """One op as it was recorded.

    `args` and `kwargs` hold a `View` where an ordinary tensor was. `reads`: the slots it read, each once. `made`: the new
    slots with a tensor on each; `mutates`: (slot overwritten, new slot, tensor). `call`: how to run it again, where that is
    possible.
    """

    func: OpOverload
    rule: Rule
    args: tuple
    kwargs: dict[str, Any]
    reads: tuple[Slot, ...]
    made: list[tuple[Slot, torch.Tensor]]
    mutates: list[tuple[Slot, Slot, torch.Tensor]]
    call: Call | None
    replayable: bool

    @property
    def startable(self) -> bool:
        """Whether the call can run again: all that it reads is there, or can be made."""
        return self.call is not None and self.call.repeats and all(s.ok or s.value is not None for s in self.reads)

    def remakes(self, slot: Slot) -> bool:
        """Whether the bytes of this new slot are made by running the call again."""
        return not slot.empty and slot.index < self.rule.makes


class Observer(Protocol):
    """Who watches a step being recorded (the tracer). `end` is given the real arguments and results too."""

    def begin(self, func: OpOverload) -> None: ...
    def ran(self) -> None: ...
    def end(self, record: OpRecord, args: tuple, kwargs: dict, out: Any) -> None: ...


class Owner(Protocol):
    """Who decides over the slots (the engine).

    `recorded`: an op ran; sets `slot.value` to hold what it made.
    `overwrites`: the bytes of a slot that recorded ops have read, and that no recipe makes, are about to change.
    `resizes`: the storage of a slot is about to get another size.
    `wants_state`: whether to note the generator's state for the op that comes next.
    """

    def recorded(self, record: OpRecord) -> None: ...
    def overwrites(self, slot: Slot) -> None: ...
    def resizes(self, slot: Slot) -> None: ...
    def wants_state(self) -> bool: ...
