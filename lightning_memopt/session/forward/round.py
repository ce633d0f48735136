"""A round: a recorded forward, and the backward that belongs to it. Its contexts are left on every exit.

A call of the model is a forward. Code that trains through methods calls modules of the model in turn, with ops of its own in
between and a loss behind. There, the first call begins a forward that *stays open*: all that follows belongs to it, until one
of these ends it:

    a backward begins, or an update                          the forward is over
    another model's round begins in this thread              the same: recorders of two models would see each op twice
    a call raises                                            the forward is given up
    autograd has let go of all that the forward saved, and   the same: it had no backward (a move of an agent without no_grad,
    a module is called with nothing that came of it, or      an exception behind the call)
    many ops have followed
    a module is called, and all calls so far were moves      the same (moves.py)

Saved-tensor hooks of the user that are on when such a forward begins may end at any time, and torch would then take off ours,
the innermost. So a forward within them lasts as long as the call. Dispatch modes of the user have no such effect: ours is
beneath.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_memopt.record import before_backwards, uncompiled
from lightning_memopt.runtime import Engine
from lightning_memopt.session.forward.moves import Calls, Moves
from lightning_memopt.session.forward.recording import Recording
from lightning_memopt.session.forward.saving import innermost_pack
from lightning_memopt.session.forward.shapes import Entry, Signature

Begin = Callable[[int | Entry], Recording | None]
Ended = Callable[[Engine], None]

_OPS = 32
"""Maximum number of ops that are recorded after autograd has let go of all that a forward saved: each takes as long as any."""


class Rounds:
    """The rounds of one model, one at a time.

    `begin(part)` gives the contexts of a round; None where nothing is to be recorded. `ended(engine)` is called when the
    forward of a round is over. In manual optimization, backward runs inside of a call of the model: the round is shut before
    it, and the next module that runs in training opens another round, the next `part`.

    inside: a call that is a forward, or a part of one, is running.
    is_open: a forward is open, in whatever thread.
    is_called: a call of the model itself was a forward of this step.
    watches_entries: calls of single modules may begin forwards: the last step had no call of the model, or none before theirs.
    moves: calls of modules that begin no forward.
    """

    def __init__(self) -> None:
        self.inside = self.is_open = self.is_called = self._is_entered = False
        self.watches_entries = True
        self.moves = Moves()
        self._calls = Calls(self.moves)
        self._ops = 0  # since autograd has let go of all that the open forward saved
        self._begin: Begin | None = None  # only during a call: it refers to the batch, which the loop may let go of then
        self._ended: Ended | None = None  # only during a forward: it refers to the owner of this object
        self._part: int | Entry = 0
        self._recording: Recording | None = None
        self._thread = 0  # in which the contexts of the recording are entered
        self._reopens: Any = None
        self._until_backward = contextlib.ExitStack()

    @contextlib.contextmanager
    def around(self, begin: Begin, ended: Ended, entry: Entry | None = None, call: Signature | None = None) -> Iterator[None]:
        """Around a call that is a forward, or a part of the open one. `entry`: what is called, where that is not the model: the
        forward stays open after the call. `call`: its signature.
        """
        self.inside = True
        try:
            if not self.is_open:
                self._begin, self._ended, self._part = begin, ended, 0 if entry is None else entry
                self._enter()
            if self.is_open and self._recording is not None and call is not None:
                self._calls.begins(call, self._recording)
            yield
            if not self.is_open:
                self._shut()
            elif self._recording is not None:
                self._calls.ended(self._recording)
        except BaseException:
            self.leave()
            raise
        finally:
            self.inside, self._begin = False, None
            if not self.is_open:
                self._ended = None

    def goes_on(self, batch: Any) -> bool:
        """Whether a call with these arguments is a part of the forward that is open in this thread. A forward that can have no
        backward is given up first.
        """
        if self.inside or not self.is_open or self._is_elsewhere():
            return False
        recording = self._recording
        if self._ended is None:
            self.leave()
        elif recording is not None and self._calls.saved and not (recording.is_saved or recording.leads_to(batch)):
            self._calls.let_go()
            self.leave()
        elif recording is not None and self._calls.are_moves(recording):
            self.leave()
        return self.is_open

    def _ends(self) -> bool:
        """An op of the open forward is about to run. Whether the forward is given up, and this op is not recorded."""
        recording = self._recording
        if self.inside or recording is None or not self._calls.saved or recording.is_saved:
            self._ops = 0
            return False
        self._ops += 1
        if self._ops <= _OPS:
            return False
        self._calls.let_go()
        self._ended = None
        recording.stop()
        return True

    @property
    def busy(self) -> bool:
        """Whether no other forward may begin now."""
        return self.inside or self.is_open

    @property
    def is_unrecorded(self) -> bool:
        """Whether a forward of this thread is open and nothing of it is recorded: it need not be told of calls."""
        return self.is_open and self._recording is None and self._thread == threading.get_ident()

    def shut(self) -> None:
        """The forward that is open is over, if there is one."""
        if self.is_open and not self.inside:
            self._shut()

    def step_ended(self) -> None:
        """The step is over, and with it a forward that is open."""
        if self.is_open:
            self.shut()
        self.moves.step_ended(trained=self._is_entered or self.is_called)
        self.watches_entries = self._is_entered or not self.is_called
        self._is_entered = self.is_called = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward, which may run inside a round (manual optimization): the next call of a module is a forward of its
        own.
        """
        if not self.inside:
            yield
            return
        self._shut()
        yield
        assert isinstance(self._part, int), "a backward inside of an open forward is a part of it"
        self._part += 1
        if self._reopens is None and self._ended is not None:
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
                self._ended = None
            else:
                if self._recording is not None:
                    self._recording.__exit__()
                    self._recording = None  # not before: after an interrupt, contexts still entered must be known
                self._close()

    def _enter(self) -> None:
        """A forward begins."""
        thread = threading.get_ident()
        other = _open_in.get(thread)
        if other is not None:
            other.shut()
        entered = isinstance(self._part, Entry)
        stays_open = entered and innermost_pack() is None
        self._open(beneath=stays_open)
        self.is_called = self.is_called or not entered
        self._is_entered = self._is_entered or entered
        if stays_open:
            self._thread, self.is_open = thread, True
            _open_in[thread] = self
            if self._recording is not None:
                self._recording.recorder.ends = self._ends
            self._until_backward.enter_context(before_backwards(self._backward_begins))

    def _close(self) -> None:
        """The forward is no longer open."""
        if self.is_open:
            self._until_backward.close()
            self._calls.clear()
            _open_in.pop(self._thread, None)
            self.is_open = False
            if not self.inside:
                self._ended = None

    def _is_elsewhere(self) -> bool:
        """Whether the open forward is one of another thread. If that has ended, the forward has, too."""
        if self._thread == threading.get_ident():
            return False
        if not any(thread.ident == self._thread for thread in threading.enumerate()):
            recording, self._recording = self._recording, None
            if recording is not None:
                recording.thread_ended()
            self.leave()
        return True

    @uncompiled
    def _backward_begins(self, goes_on: bool) -> None:
        if not goes_on and not self.inside and self._thread == threading.get_ident():
            self._shut()

    def _open(self, beneath: bool = False) -> None:
        assert self._begin is not None
        recording = self._begin(self._part)
        if recording is not None:
            self._thread = threading.get_ident()
            recording.beneath = beneath
            recording.__enter__()
            self._recording = recording

    def _shut(self) -> None:
        recording, ended = self._recording, self._ended
        self.leave()
        if recording is not None and ended is not None and self._recording is None:
            ended(recording.engine)

    @uncompiled
    def _reopen(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._stay_shut()
            self._open()

    def _stay_shut(self) -> None:
        handle, self._reopens = self._reopens, None
        if handle is not None:
            handle.remove()


_open_in: weakref.WeakValueDictionary[int, Rounds] = weakref.WeakValueDictionary()
"""Thread -> whose forward is open in it."""
