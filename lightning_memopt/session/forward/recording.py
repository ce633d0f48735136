"""The contexts that record one forward. They are left on every exit."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt.graph import COMPILED
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import (
    Listening,
    Recorder,
    around_calls,
    around_dual_levels,
    in_dual_level,
    in_transform,
    is_plain,
    storage_id,
    told_of_compiled,
    uncompiled,
    undo,
    watching,
    watching_sizes,
)
from lightning_memopt.record.gathered import around_units, units_of, unseen_by
from lightning_memopt.record.undoing import Calls
from lightning_memopt.runtime import Engine, PlannedEngine, see_ops
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.matching import Matcher
from lightning_memopt.session.forward.gathering import Hidden
from lightning_memopt.session.forward.leaves import leaves_of
from lightning_memopt.session.forward.saving import SavedTensorHooks, innermost_pack
from lightning_memopt.torch_private import current_mode, hooks_are_enabled


class _Pack:
    """The pack hook of an engine. Every saved tensor keeps the hook until its node is done, even a tensor that the engine does
    not handle. So the hook does not keep the engine: the tape dies with the last handle.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    @uncompiled
    def __call__(self, t: torch.Tensor) -> object:
        engine = self._engine()
        assert engine is not None, "the forward, which holds the engine, is over"
        return engine.pack(t)

    def free(self) -> None:
        """The forward is over."""


def hooks_of(engine: Engine) -> tuple[Any, Callable[[Any], Any]]:
    """(pack hook, unpack hook)."""
    native = engine.native if isinstance(engine, PlannedEngine) else None
    return (_Pack(engine), engine.unpack) if native is None else (native.pack_hook(weakref.ref(engine)), native.unpack)


class Recording:
    """The contexts around one forward: saved-tensor hooks, hooks for exposed tensors, and the dispatch mode.

    own_mode: the dispatch mode is entered, too; if not, an observation has entered it.
    beneath: the dispatch mode is entered beneath those of the user, which end before this forward.
    """

    def __init__(self, engine: Engine, recorder: Recorder, own_mode: bool) -> None:
        self.engine = engine
        self.recorder = recorder
        self._watching: Calls = []
        self._saving: Calls = []
        self._pack, unpack = hooks_of(engine)
        self._hooks = SavedTensorHooks(self._pack, unpack)
        self._own_mode = own_mode
        self.beneath = False
        self._aside = False
        self._saved: Version | None = None

    @property
    def is_saved(self) -> bool:
        """Whether autograd has a handle on a tensor of this forward."""
        if self._saved is None or not self._saved.holding.handles:
            versions = reversed(self.engine.tape.versions.values())
            self._saved = next((version for version in versions if version.holding.handles), None)
        return self._saved is not None

    def leads_to(self, batch: Any) -> bool:
        """Whether any tensor in a batch was computed in this forward from weights, by ops that can run again. Data that is
        loaded or drawn meanwhile was not.
        """
        versions, known = self.engine.tape.versions, self.recorder.of_storage
        tensors = (t for t in leaves_of(batch) if isinstance(t, torch.Tensor) and is_plain(t))
        waiting = {version.id: version for t in tensors if (version := known.get(storage_id(t))) is not None}
        seen = set[int]()
        while waiting:
            id, version = waiting.popitem()
            seen.add(id)
            if version.parameter:
                return True
            reads = () if version.call is None else version.call.reads
            waiting |= {read: versions[read] for read in reads if read in versions and read not in seen}
        return False

    def saves_any(self, ids: range) -> bool:
        """Whether autograd has a handle on any version with one of these ids."""
        versions = self.engine.tape.versions
        return any(version.holding.handles for id in ids if (version := versions.get(id)) is not None)

    def stop(self) -> None:
        """Record no more. Contexts stay as they are: an op may be under way."""
        self.recorder.capturing = False
        self.recorder.ends = None
        self.engine.end_forward()

    def __enter__(self) -> Recording:
        try:
            self.engine.begin_forward(self.recorder)
            self.recorder.capturing = True
            self._watch()
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _watch(self, *more: Listening) -> None:
        recorder = self.recorder
        forward = watching(recorder.expose, recorder.settings_changed, self._pack)
        levels = around_dual_levels(self._level_begins, self._level_ends)
        # else the observation listens to sizes until the end of the step
        sizes = (watching_sizes(recorder.resizing, recorder.resized),) if self._own_mode else ()
        for seams, listener in (*more, forward, *sizes, levels):
            self._watching.append(partial(seams.leave, listener))
            seams.enter(listener)

    def _enter(self, context: contextlib.AbstractContextManager[None]) -> None:
        context.__enter__()
        self._watching.append(partial(context.__exit__, None, None, None))

    def _level_begins(self) -> None:
        """A level of forward-mode AD begins: its ops run unrecorded (record/levels.py)."""
        if self._may_leave():
            self._aside = True
            undo(self._saving)

    def _level_ends(self) -> None:
        if self._aside:
            self._aside = False
            self._begin()

    def _may_leave(self) -> bool:
        """Whether the contexts of this recording are the innermost ones, and can be entered again."""
        if not hooks_allowed() or (self._own_mode and current_mode() is not self.recorder):
            return False
        return self._hooks.innermost

    def _begin(self) -> None:
        self._saving.append(self._unhook)
        self._hooks.enter()
        if self._own_mode:
            self._saving.append(self.recorder.leave)
            self.recorder.enter(self.beneath)

    def _wake_hooks(self) -> None:
        """Switch on the hooks of this thread's planned forward, which the native engine had switched off."""
        if self.engine.native is not None:
            self.engine.native.wake()

    def _unhook(self) -> None:
        self._wake_hooks()
        self._hooks.leave()

    def __exit__(self, *_: Any) -> None:
        self._aside = False
        undo([self.thread_ended, partial(undo, self._saving)])

    def thread_ended(self) -> None:
        """Leave what is left of the contexts where the thread of the forward has ended: hooks and modes ended with it."""
        stop = partial(setattr, self.recorder, "capturing", False)
        # the engine outlives the recorder
        undo([self._forget, stop, self.engine.end_forward, self._pack.free, partial(undo, self._watching)])

    def _forget(self) -> None:
        """The recorder is no longer told of ops: an observed step goes on with it."""


class PlannedRecording(Recording):
    """Recording under a plan: modules without a decision of the plan run unrecorded."""

    engine: PlannedEngine
    recorder: Matcher

    def __init__(self, engine: PlannedEngine, model: nn.Module) -> None:
        recorder = engine.make_recorder()
        super().__init__(engine, recorder, own_mode=True)
        self.recorder = recorder
        recorder.placing.places.model = weakref.ref(model)
        self._spans = engine.learned.spans_of(model)
        self._sharded = bool(engine.program.graph.windowed and units_of(model))
        self._outside: nn.Module | None = None
        self._left: tuple[object, ...] = ()
        self._depth = 0
        self._thread = threading.get_ident()

    @property
    def is_saved(self) -> bool:
        return bool(self.engine.turns.packed) and super().is_saved  # without a look at all versions, where there is none

    def saves_any(self, ids: range) -> bool:
        return True  # not known: versions have the ids of the plan's tensors

    def _forget(self) -> None:
        if self.engine.between is None:
            self.recorder.forget()

    def _watch(self, *more: Listening) -> None:
        if self._spans:
            quiet = [module for weak, _ in self._spans.values() if (module := weak()) is not None]
            self._enter(around_calls(quiet, self._module_begins, self._module_ends))
        if self._sharded:
            self._enter(around_units(Hidden(self.recorder)))
        if self.engine.native is not None:
            see_ops(self.engine.native, self._watching)
        super()._watch(*told_of_compiled(self._compiled), *more)

    @contextlib.contextmanager
    def _compiled(self) -> Iterator[None]:
        """Around a run of generated code: an op of the plan that the recorder does not see."""
        with unseen_by(self.recorder):
            yield
        cursor, names = self.engine.cursor, self.engine.program.names
        if threading.get_ident() == self._thread and names[cursor.position : cursor.position + 1] == [COMPILED]:
            cursor.advance()
            self._wake_hooks()  # the plan may handle a result that the code saves now

    def _module_begins(self, module: nn.Module) -> None:
        if self._outside is not None:
            if module is self._outside and threading.get_ident() == self._thread:
                self._depth += 1
        elif self._first_op(module) == self.engine.cursor.position and self._may_leave():
            if self.engine.cursor.past_fence:
                self.engine.parking.pass_fences()
            self._outside, self._depth = module, 0
            undo(self._saving)
            self._left = _around()

    def _first_op(self, module: nn.Module) -> int | None:
        span = self._spans.get(id(module))
        return None if span is None else span[1][0]

    def _module_ends(self, module: nn.Module) -> None:
        if module is self._outside and threading.get_ident() == self._thread:
            if self._depth:
                self._depth -= 1  # the module had called itself
                return
            self._outside = None
            self.engine.cursor.skip_to(self._spans[id(module)][1][1])
            if all(map(is_, _around(), self._left)):
                self._begin()
            else:  # a context that it entered must be the innermost one when it is left: the forward goes on unrecorded
                self.engine.learned.always_recorded(module)

    def __exit__(self, *error: Any) -> None:
        self._outside = None  # the forward may end inside of a module: in manual optimization, where backward begins
        super().__exit__(*error)

    def _may_leave(self) -> bool:
        return threading.get_ident() == self._thread and super()._may_leave() and self.recorder.settle()


def _around() -> tuple[object, ...]:
    """The innermost dispatch mode, the innermost pack hook, and whether saved-tensor hooks are allowed."""
    return current_mode(), innermost_pack(), hooks_allowed()


def hooks_allowed() -> bool:
    """Whether saved-tensor hooks can be entered now: not on a level of functorch or forward-mode AD, and not where they are
    disabled (R9).
    """
    if in_transform() or in_dual_level():
        return False
    return bool(hooks_are_enabled())


def others_hooks() -> bool:
    """Whether other saved-tensor hooks are on that a recording would replace. A checkpoint among them runs the forward twice,
    and everything that it writes is written twice. `save_on_cpu` does not count: it only moves tensors.
    """
    pack = innermost_pack()
    if pack is None or type(pack) is _Pack or ((native := loaded()) is not None and type(pack) is native.Pack):
        return False
    return not getattr(pack, "__qualname__", "").startswith("save_on_cpu.")


def in_checkpoint() -> bool:
    """Whether the innermost saved-tensor hooks are those of a checkpoint."""
    return getattr(innermost_pack(), "__module__", "") == checkpoint.__module__
