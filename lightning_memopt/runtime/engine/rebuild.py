"""Run recorded calls again: the arithmetic of replay, without any decision about when.

R2: a call that mutates runs on its input's bytes only when nobody else needs them, otherwise on a copy.
R6: replay runs below Autograd and Autocast, with dispatch modes and hooks off, under the grad mode recorded.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload

from lightning_memopt.errors import ModifiedError, ReplayMismatchError
from lightning_memopt.record import UNKNOWN, Call, Slot, Tape, View, in_transform, numeric_flags, set_numeric_flags, tensors_in

_ABOVE = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))  # of `autograd.grad(is_grads_batched=True)`: no draws
)

_CHUNK = 1 << 12
_STEP = 0x1E3779B97F4A7C15
"""Odd, by which chunks are told apart."""


def _drawn(n: int) -> torch.Tensor:
    """Odd weights without a pattern, the same ones in every run."""
    own = torch.Generator().manual_seed(1)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=own).bitwise_or_(1)


_ON_CPU = torch.frombuffer(array("q", _drawn(_CHUNK).tolist()), dtype=torch.int64)
"""Python's memory, not torch's: a budget counts what is alive of that, and a plain run has none of these 32 KiB."""


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """A weight for each word of a chunk; larger ones where every op is launched."""
    return _ON_CPU if device.type == "cpu" else _drawn(16 * _CHUNK).to(device)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Where replays run: no modes, no autograd, no autocast, no functorch, no saved-tensor hooks (they live above autograd).

    Calls run in it under their own grad mode; that of the caller is put back.
    """
    grad = torch.is_grad_enabled()
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_ABOVE):
        try:
            with temporarily_clear_interpreter_stack() if in_transform() else contextlib.nullcontext():
                yield
        finally:
            torch._C._set_grad_enabled(grad)


@contextlib.contextmanager
def flags_of(tape: Tape) -> Iterator[None]:
    """The numeric settings of the forward pass; restored after the replay."""
    now, then = numeric_flags(), tape.flags
    if now == then:
        yield
        return
    set_numeric_flags(then)
    try:
        yield
    finally:
        set_numeric_flags(now)


class StartChangedError(ModifiedError):
    """A rebuild would start from a slot that was changed after the forward; who knows the step names it."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(f"a tensor of {slot.nbytes} bytes that a rebuild starts from was changed after the forward")
        self.slot = slot


def checksum(t: torch.Tensor) -> tuple[int, int]:
    """A sum over the bits of a tensor's storage, in which every word has the weight of its place, and what is left of the last
    word. Exact, and the same on every device; NaN payloads and signed zeros count, and so does an exchange of two words.
    """
    bits = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    whole = bits.numel() // 8 * 8
    tail = int.from_bytes(bytes(bits[whole:].tolist()), "little") if whole < bits.numel() else 0
    weights = _weights(t.device)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for words in bits[:whole].view(torch.int64).split(weights.numel()):
        of_chunk = weights[: words.numel()]
        # only on the CPU has torch a product of integers that needs no memory
        total.mul_(_STEP).add_(torch.dot(words, of_chunk) if t.is_cpu else (words * of_chunk).sum())
    return int(total.item()), tail


def mismatch(op: str, nbytes: int) -> ReplayMismatchError:
    return ReplayMismatchError(
        f"{op} was run again to rebuild {nbytes} bytes and gave other bits than the first time. Nothing has been updated "
        f"in this step. Mark it with register_op({op}, 'opaque'), so that its result is kept."
    )


def intact(slot: Slot) -> bool:
    """Whether the value is what it was when the forward ended, or when it was rebuilt.

    A counter goes back only where torch was told to put it back, by who vouches for the bytes (FSDP gathers weights so).
    """
    return slot.value is None or slot.noted == UNKNOWN or slot.value._version <= slot.noted


def came_back(slot: Slot) -> bool:
    """Fetch the value of a slot whose very bytes are away; whether there are such."""
    if slot.away is None or not slot.away.exact or slot.away.spent:
        return False
    with below_autograd():
        slot.value = slot.away.value()
    slot.noted = slot.value._version
    slot.stream = torch.cuda.current_stream(slot.device) if slot.value.is_cuda else None
    return True


def missing(slot: Slot) -> bool:
    """Whether a rebuild that reads the slot must make it first. What was changed is let go (R7) or refused (R5)."""
    if slot.value is None:
        return not came_back(slot)
    if intact(slot) and slot.value.untyped_storage().nbytes() >= slot.nbytes:
        return False
    if slot.call is None or not slot.ok:
        raise StartChangedError(slot)
    slot.value = None
    return True


@cache
def _drawing_from_a_generator(func: OpOverload) -> OpOverload | None:
    """The op, or its overload that draws the same numbers, if it is told which generator to draw from; None where none is."""
    packet, name = func._overloadpacket, func._overloadname
    names = (name, "generator" if name == "default" else f"{name}_generator", f"generator_{name}")
    for overload in (getattr(packet, n) for n in names if n in packet.overloads()):
        taken = {a.name: str(a.type) for a in overload._schema.arguments}
        own = {a.name: str(a.type) for a in func._schema.arguments}
        if "generator" in taken and {**own, "generator": ""} == {**taken, "generator": ""}:
            return overload
    return None


def _draw(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op on the numbers that it drew. The generator of the run does not move, which other threads may draw from.

    An op that takes no generator draws from that one all the same, in the state that it had.
    """
    assert call.rng is not None
    generator, state = call.rng
    func = _drawing_from_a_generator(call.func)
    if func is not None:
        own = torch.Generator(generator.device)
        own.set_state(state)
        if any(isinstance(a, torch.Generator) for a in args):
            return func._op(*(own if isinstance(a, torch.Generator) else a for a in args), **kwargs)
        return func._op(*args, **(kwargs | {"generator": own}))
    now = generator.get_state()
    generator.set_state(state)
    try:
        return call.func._op(*args, **kwargs)
    finally:
        generator.set_state(now)


def in_order(slot: Slot) -> None:
    """R11: the current CUDA stream may read the slot's value from here on, and its memory is not used again before."""
    value = slot.value
    if value is None or not value.is_cuda:
        return
    stream = torch.cuda.current_stream(value.device)
    if slot.stream == stream:
        return
    if slot.stream is not None:  # a rebuild on another stream; what the forward made, the user has put in order
        stream.wait_stream(slot.stream)
    with torch._C._DisableTorchDispatch():  # no op of the step
        value.record_stream(stream)
    slot.stream = stream


def _restored(v: Any, slots: dict[int, Slot], fresh: dict[int, torch.Tensor]) -> Any:
    """An argument of a call as it was. A function of its own: a recursive closure would be a reference cycle."""
    if type(v) is View:
        base = fresh.get(v.slot) if fresh else None
        if base is None:
            base = slots[v.slot].value
            assert base is not None
        return v.on(base)
    if type(v) is list:
        return [_restored(x, slots, fresh) for x in v]
    return v


def run(call: Call, slots: dict[int, Slot], survives: Callable[[Slot], bool]) -> None:
    """Run a call on the values of the slots it reads and set the values of those it makes. Call inside `below_autograd`.

    `survives` says which mutated inputs somebody still needs: those are copied first.
    """
    fresh: dict[int, torch.Tensor] = {}
    for id in call.reads:
        in_order(slots[id])
    for id, _ in call.mutates:
        if id in fresh:
            continue
        old = slots[id]
        base = old.value
        assert base is not None
        if survives(old):
            bytes_ = base.untyped_storage().clone()
            fresh[id] = torch.empty(0, dtype=base.dtype, device=base.device).set_(
                bytes_, 0, (bytes_.nbytes() // base.element_size(),), (1,)
            )
        else:
            fresh[id] = base

    args = [_restored(a, slots, fresh) for a in call.args]
    kwargs = {k: _restored(v, slots, fresh) for k, v in call.kwargs.items()}
    torch._C._set_grad_enabled(call.grad)  # the engine's threads, and `below_autograd`, put it back
    out = call.func._op(*args, **kwargs) if call.rng is None else _draw(call, args, kwargs)
    if call.made:
        outs = tensors_in(out)
        for index, id in call.made:
            slot = slots.get(id)
            if slot is not None and slot.value is None:
                slot.value = outs[index]
                slot.noted = slot.value._version
                slot.stream = torch.cuda.current_stream(slot.device) if slot.value.is_cuda else None
    for old_id, new_id in call.mutates:
        new = slots.get(new_id)
        if new is not None:
            new.value = fresh[old_id]
            new.noted = new.value._version
            new.stream = slots[old_id].stream
        if fresh[old_id] is slots[old_id].value:
            slots[old_id].value = None
