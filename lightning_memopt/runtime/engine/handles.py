"""The objects that autograd holds instead of saved tensors: a `Handle` on a storage version, or a `Kept` with the tensor."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_memopt.record import UNKNOWN, View, is_plain, uncompiled
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.naming import Names, modified, of_kept
from lightning_memopt.torch_private import no_dispatch_modes

_EMPTY: dict[torch.dtype, torch.Tensor] = {}
"""Dtype -> a CPU tensor without memory."""


def alias(t: torch.Tensor) -> torch.Tensor:
    """An alias of `t` without history that shares its version counter. Only for use in autograd's hooks: inside a dispatch
    mode, use `record.detached`.
    """
    with no_dispatch_modes():
        return t.detach()


def version_guard(t: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of `t`. It shows in-place changes after `t` was dropped."""
    empty = _EMPTY.get(t.dtype) if t.is_cpu else None
    with no_dispatch_modes():
        if empty is None:
            empty = torch.empty(0, dtype=t.dtype, device=t.device)
            if t.is_cpu:
                _EMPTY[t.dtype] = empty
        guard = t.detach()
        guard.data = empty
    return guard


class Kept:
    """The tensor itself, and the version it had when saved, because saved-tensor hooks switch autograd's own check off.

    t: the tensor, without its history if it had one.
    counter: its version counter when it was saved; UNKNOWN for inference tensors, which count no versions.
    about: (names, key of the tensor in them), for messages; it does not refer to an engine.
    """

    __slots__ = ("about", "counter", "t")

    def __init__(self, t: torch.Tensor, about: tuple[Names, int] | None = None) -> None:
        self.about = about
        # Only an ordinary tensor can be detached below the dispatch modes. Do not read `grad_fn`: it makes an object for the
        # node, which then releases what it saved in another order.
        has_history = t.requires_grad and not t.is_leaf
        self.t = alias(t) if has_history and is_plain(t) else t
        self.counter = UNKNOWN if t.is_inference() else t._version

    @uncompiled
    def get(self) -> torch.Tensor:
        """The tensor. Raises ModifiedError where autograd would."""
        if self.counter != UNKNOWN and self.t._version != self.counter:
            raise modified(of_kept(self.t, self.about), self.t._version, self.counter)
        return self.t


class Gives(Protocol):
    """The part of the engine that a handle uses."""

    def unpacked(self, handle: Handle) -> torch.Tensor: ...
    def released(self, handle: Handle) -> None: ...


class Handle:
    """The object that autograd holds instead of a storage version. Its destructor tells the engine of the release. Where the
    native engine is loaded, it makes handles of its own class, with the methods of this one.

    save: the number of the save.
    version: the storage version that was saved.
    view: the window on it that was saved.
    guard: has the version counter of the saved tensor (`version_guard`).
    counter: the version counter when it was saved.
    times: how often autograd has asked for the tensor.
    engine: returns the tensor when asked; None after the release.
    """

    __slots__ = ("counter", "engine", "guard", "save", "times", "version", "view")

    def __init__(self, engine: Gives, save: int, version: Version, view: View, guard: torch.Tensor) -> None:
        self.save = save
        self.version = version
        self.view = view
        self.guard = guard
        self.counter = guard._version
        self.times = 0
        version.holding.handles += 1
        self.engine: Gives | None = engine  # set last, so that the destructor of a half-made handle does nothing

    @property
    def now(self) -> int:
        """The present version counter of the saved tensor."""
        return self.guard._version

    def counted(self) -> torch.Tensor:
        """A tensor without memory that shares the version counter of the saved tensor."""
        return self.guard

    @uncompiled
    def get(self) -> torch.Tensor:
        """The tensor, rebuilt or fetched where it is not in memory."""
        assert self.engine is not None
        return self.engine.unpacked(self)

    @uncompiled
    def __del__(self) -> None:
        try:
            engine, self.engine = self.engine, None
        except AttributeError:
            return
        if engine is not None:
            self.version.holding.handles -= 1
            engine.released(self)
