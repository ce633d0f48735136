"""Our hooks on torch's stack of saved-tensor hooks. User code may leave hooks of its own in another order than it entered them.

Torch's own contexts take off the innermost hooks, even if somebody else entered them. `leave` looks for our own hooks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_memopt.torch_private import AUTOGRAD, innermost_hooks

Pack = Callable[[Any], Any]


def innermost_pack() -> Any:
    """The pack hook of the innermost saved-tensor hooks; None where there are none."""
    top = innermost_hooks(True)
    return None if top is None else top[0]


class SavedTensorHooks:
    """A pack and an unpack hook. `enter` and `leave` may be interrupted, and `leave` repeated."""

    def __init__(self, pack: Pack, unpack: Pack) -> None:
        self.pack, self._unpack = pack, unpack
        self._beneath: Any = None
        self._entered = False

    @property
    def innermost(self) -> bool:
        return innermost_pack() is self.pack

    def enter(self) -> None:
        self._beneath = innermost_pack()
        AUTOGRAD._push_saved_tensors_default_hooks(self.pack, self._unpack)
        self._entered = True

    def leave(self) -> None:
        """Take our hooks off the stack. Hooks that were entered after ours and are still on stay."""
        if not (self._entered or self.innermost):
            return
        self._entered = False
        above = []
        while (top := innermost_hooks(True)) is not None:
            AUTOGRAD._pop_saved_tensors_default_hooks()
            if top[0] is self.pack:
                break
            above.append(top)
        else:  # the user left the hooks beneath ours, and torch took ours: theirs are still on
            theirs = next((hooks for hooks in above if hooks[0] is self._beneath), None)
            above = [hooks for hooks in above if hooks is not theirs]
        for pack, unpack in reversed(above):
            AUTOGRAD._push_saved_tensors_default_hooks(pack, unpack)
