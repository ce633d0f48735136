"""One round: a forward pass, recorded, and the backward that belongs to it. What is entered is left on every exit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.record import Recorder, watching
from lightning_memopt.runtime import Engine


class Recording:
    """The contexts around one forward: hooks, exposure watch and, unless somebody else holds it, the dispatch mode."""

    def __init__(self, engine: Engine, recorder: Recorder, own_mode: bool) -> None:
        self.engine = engine
        self.recorder = recorder
        self._stack = contextlib.ExitStack()
        self._own_mode = own_mode

    def __enter__(self) -> Recording:
        self.engine.recorder = self.recorder
        self.recorder.capturing = True
        stack = self._stack
        try:
            stack.enter_context(watching(self.recorder.expose))
            stack.enter_context(saved_tensors_hooks(self.engine.pack, self.engine.unpack))
            if self._own_mode:
                stack.enter_context(self.recorder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._stack.close()
        finally:
            self.engine.recorder = None  # the engine outlives the forward, the recorder's map must not
            self.recorder.capturing = False
            if self._own_mode:
                self.recorder.forget()


def hooks_allowed() -> bool:
    """Saved-tensor hooks can be entered here: not under functorch, not where they are disabled (Rule 9)."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
