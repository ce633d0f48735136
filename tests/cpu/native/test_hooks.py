"""Pack hooks of the native engine: never destroyed, used by one forward after another."""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.native import engine
from tests.cpu.lib.engines import needs_native

pytestmark = needs_native


class Packed(NamedTuple):
    t: torch.Tensor

    def get(self) -> torch.Tensor:
        return self.t


class Keeping:
    """In the place of an engine that packs in Python, and answers in Python."""

    packing = None

    def pack(self, t: torch.Tensor) -> Packed:
        return Packed(t.detach())


class Doubling:
    """In the place of an engine that packs in Python."""

    packing = None

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        return t * 2


def test_a_hook_is_used_again_after_its_forward_and_only_then():
    first, second = Doubling(), Doubling()
    hook = engine.loaded().pack_hook(weakref.ref(first))
    assert engine.loaded().pack_hook(weakref.ref(second)) is not hook
    hook.free()
    hook.free()  # an exit that was interrupted runs twice
    again = engine.loaded().pack_hook(weakref.ref(second))
    assert again is hook and engine.loaded().pack_hook(weakref.ref(second)) is not hook
    assert torch.equal(hook(torch.ones(2)), torch.full((2,), 2.0))


def test_a_hook_without_a_forward_says_so():
    gone = Doubling()
    hook = engine.loaded().pack_hook(weakref.ref(gone))
    del gone
    with pytest.raises(AssertionError, match="is over"):
        hook(torch.ones(2))
    hook.free()
    with pytest.raises(AssertionError, match="is over"):
        hook(torch.ones(2))
    with pytest.raises(TypeError, match="1 argument"):
        hook()


@pytest.mark.parametrize("hooks_first", [False, True])
def test_tensors_saved_in_a_forward_outlive_it_and_the_process_goes_on(hooks_first):
    """References to the hooks that torch takes within a forward and drops after it, and the other way round."""
    module, keeper = engine.loaded(), Keeping()
    w = nn.Parameter(torch.ones(2))
    for _ in range(200):
        hook = module.pack_hook(weakref.ref(keeper))
        hooks = saved_tensors_hooks(hook, module.unpack)
        begins, ends = [partial(module.begin, keeper), hooks.__enter__], [partial(module.end, keeper), hooks.__exit__]
        for act in reversed(begins) if hooks_first else begins:
            act()
        y = (w * w).sin()
        for act in reversed(ends) if hooks_first else ends:
            act()
        hook.free()
        y.sum().backward()
    assert w.grad is not None and torch.isfinite(w.grad).all()
