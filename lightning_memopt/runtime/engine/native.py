"""Connect the native engine with the objects of the Python engine, and test it before it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch

from lightning_memopt.cxx import BuildError
from lightning_memopt.device.backends import current_stream
from lightning_memopt.native import engine
from lightning_memopt.record import (
    OUTSIDE,
    OVERWRITTEN,
    UNKNOWN,
    UNSHARED,
    Origin,
    Seams,
    StorageVersion,
    Tape,
    View,
    numeric_flags,
    uncompiled,
)
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.interrupts import DEFERRED
from lightning_memopt.record.settings import CHANGES
from lightning_memopt.record.undoing import Calls
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.holding import Claim, Holding, in_order
from lightning_memopt.runtime.engine.rebuild import StartChangedError
from lightning_memopt.torch_private import AUTOGRAD, PYTHON_KERNELS, compilation

_TESTS: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "a sum": (torch.ops.aten.add.Tensor, [2.5], {"alpha": 3}),
    "in place": (torch.ops.aten.mul_.Tensor, [0.1], {}),
    "random": (torch.ops.aten.native_dropout.default, [0.5, True], {}),
}
"""Name -> (overload, positional arguments after the first one, keyword arguments)."""


_OBJECTS = {
    **{origin.name: origin for origin in Origin},
    "NO_CLAIM": Claim.NONE,
    "POSSIBLE_CLAIM": Claim.POSSIBLE,
    "PINNED_CLAIM": Claim.PINNED,
    "OUTSIDE": OUTSIDE,
    "OVERWRITTEN": OVERWRITTEN,
    "UNKNOWN": UNKNOWN,
    "UNSHARED": UNSHARED,
    "DEFERRED": DEFERRED,
    "numeric_flags": numeric_flags,
    "CHANGES": CHANGES,
    "StartChangedError": StartChangedError,
    "__del__": Handle.__del__,
}
"""What the native module compares with, calls and raises."""


def install_native(say: Callable[[str], None]) -> None:
    """Load the native engine, once per process, and build it on first use. If that is impossible, one line says why."""
    engine.install(say, _prepare)


def see_ops(native: Any, calls: Calls) -> None:
    """A planned forward begins: from now on `native`, the native engine, sees its ops first. Appends the call that ends this to
    `calls`.
    """
    _know_python_kernels(native, len(PYTHON_KERNELS))
    forward = object()
    calls += (partial(_entering_hooks.leave, native), partial(native.end, forward))
    _entering_hooks.enter(native)
    native.begin(forward)


@lru_cache(maxsize=1)
def _know_python_kernels(native: Any, number: int) -> None:
    """Tell the native engine which ops of torch have kernels in Python. `number`: how many such kernels there are."""
    names = [name for space, name, key in (each.split("/") for each in PYTHON_KERNELS) if space == "aten" and key != "Meta"]
    native.in_python([("aten::" + name, overload) for name, _, overload in (name.partition(".") for name in names)])


def _waking(original: Any) -> Any:
    @uncompiled
    def push(*hooks: Any) -> Any:
        natives = tuple(_entering_hooks.listeners)
        if natives and compilation() is None:  # while it compiles, torch itself switches all hooks off
            natives[0].wake()  # else the pushed hooks would be off, too
        return original(*hooks)

    return push


_entering_hooks: Seams[Any] = Seams(lambda: [(AUTOGRAD, "_push_saved_tensors_default_hooks", _waking)], stays=True)


def _prepare(module: Any) -> None:
    """Raises BuildError if the module does not know this engine's objects, or gives other bits than torch's own calls."""
    _give_methods(module.StorageVersion, StorageVersion, Holding)
    _give_methods(module.Handle, Handle)
    _give_methods(module.Kept, Kept)
    _give_methods(module.View, View)
    View.register(module.View)
    try:
        module.know(_OBJECTS, in_order, current_stream)
    except (TypeError, AttributeError) as error:
        raise BuildError(f"it does not know this engine's objects ({error})") from None
    for name in _TESTS:
        if not _gives_equal_bits(module, name):
            raise BuildError(f"its test fails: {name}")


def _give_methods(native: type, *classes: type) -> None:
    """Give a class of the native engine the methods of the classes whose fields it has."""
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType | property) and not (name.startswith("__") or hasattr(native, name)):
                setattr(native, name, value)


def _gives_equal_bits(module: Any, name: str) -> bool:
    """Whether torch and the native module give the same bits for a call."""
    x = torch.arange(12.0).view(3, 4).t()
    state = torch.Generator().manual_seed(1).get_state()
    func, more, named = _TESTS[name]
    tape: Tape[Holding] = Tape(Holding, module)
    read, made = (tape.version(i, torch.empty(12)) for i in (0, 1))
    read.holding.rebuilt(x.clone())
    call = tape.call(0, func, [tape.view(0, x), *more], named, (0,), False)
    if name == "in place":
        call.mutates = ((0, 1),)
    else:
        call.made = ((0, 1),)
    if name == "random":
        call.rng = torch.default_generator, state
    call.prepared = module.prepare(func._schema.name, func._schema.overload_name, call.args, named)
    before = torch.get_rng_state()
    with below_autograd():
        tape.versions[0], tape.versions[1] = read, made
        if call.prepared is None or not module.run(call, tape.versions, lambda version: True):
            return False
        value, source = made.holding.value, read.holding.value
        if value is None or source is None or not torch.equal(source, x) or not torch.equal(torch.get_rng_state(), before):
            return False
        torch.set_rng_state(state)
        out = func(x.clone(), *more, **named)
        torch.set_rng_state(before)
    expected = out[0] if type(out) is tuple else out
    return torch.equal(value.as_strided(expected.size(), expected.stride()), expected)
