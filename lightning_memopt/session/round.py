"""A round: a recorded forward, and the backward that belongs to it. Its contexts are left on every exit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_memopt.record import uncompiled
from lightning_memopt.runtime import Engine
from lightning_memopt.session.recording import Recording

Begin = Callable[[int], Recording | None]
Ended = Callable[[Engine], None]


class Rounds:
    """The rounds of one model, one at a time.

    `begin(part)` gives the contexts of a round; None where nothing is to be recorded. `ended(engine)` is called when the
    forward of a round is over. In manual optimization, backward runs inside of a call of the model: the round is shut before
    it, and the next module that runs in training opens another round, the next `part`.

    inside: a call of the model is running.
    """

    def __init__(self) -> None:
        self.inside = False
        self._calls: tuple[Begin, Ended] | None = None  # only while inside: they refer to the owner of this object
        self._part = 0
        self._recording: Recording | None = None
        self._thread = 0  # in which the contexts of the recording are entered
        self._reopens: Any = None

    @contextlib.contextmanager
    def around(self, begin: Begin, ended: Ended) -> Iterator[None]:
        """Around one call of the model."""
        self.inside, self._calls, self._part = True, (begin, ended), 0
        try:
            self._open()
            yield
            self._shut()
        except BaseException:
            self.leave()
            raise
        finally:
            self.inside, self._calls = False, None

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward, which may run inside a round."""
        if not self.inside:
            yield
            return
        self._shut()
        yield
        self._part += 1
        if self._reopens is None and self._calls is not None:
            self._reopens = register_module_forward_pre_hook(self._reopen)

    def leave(self) -> None:
        """Leave the contexts of the round, whatever state its forward is in.

        Contexts belong to a thread. Called in another thread, this leaves them to the thread of the forward, which leaves them
        when the forward is over; it is no longer a round.
        """
        try:
            self._stay_shut()
        finally:
            if self._recording is not None and self._thread != threading.get_ident():
                self._calls = None
            elif self._recording is not None:
                self._recording.__exit__()
                self._recording = None  # not before: after an interrupt, contexts that are still entered must be known

    def _open(self) -> None:
        assert self._calls is not None
        recording = self._calls[0](self._part)
        if recording is not None:
            self._thread = threading.get_ident()
            recording.__enter__()
            self._recording = recording

    def _shut(self) -> None:
        recording = self._recording
        self.leave()
        if recording is not None and self._calls is not None:
            self._calls[1](recording.engine)

    @uncompiled
    def _reopen(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._stay_shut()
            self._open()

    def _stay_shut(self) -> None:
        handle, self._reopens = self._reopens, None
        if handle is not None:
            handle.remove()
