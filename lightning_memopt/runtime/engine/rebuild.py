"""Run recorded calls again. Other files decide when.

R2: a call that mutates an input runs on the input's own bytes only if nothing else needs them, otherwise on a copy.
R6: rebuilds run below Autograd and Autocast, without dispatch modes and hooks, under the recorded grad mode.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from lightning_memopt.device.backends import current_stream
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import ModifiedError, NotGatheredError, RebuildMismatchError, UnsupportedError
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import Call, Tape, View, numeric_flags, set_numeric_flags, tensors_in
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.tensors import bytes_of
from lightning_memopt.runtime.engine.holding import Holding, Version, copy_of, in_order, rebuildable
from lightning_memopt.torch_private import OpOverload, set_grad_enabled

Versions = Mapping[int, Version]

_CHUNK = 1 << 12
_STEP = 0x1E3779B97F4A7C15
"""Odd factor between the weights of one chunk and the next."""


def _drawn(n: int) -> torch.Tensor:
    """`n` odd weights, pseudo-random, and the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator).bitwise_or_(1)


_ON_CPU = torch.frombuffer(array("q", _drawn(_CHUNK).tolist()), dtype=torch.int64)
"""Weights in Python's memory. A budget counts torch's memory, where a run without this package does not have these 32 KiB."""


@cache
def checksum_weights(device: torch.device) -> torch.Tensor:
    """A weight for each word of a chunk. Off the CPU, chunks are larger, because each op is a launch. Weights are made once per
    process, before a step is observed, so that its graph counts their bytes.
    """
    return _ON_CPU if on_host(device) else _drawn(16 * _CHUNK).to(device)


@contextlib.contextmanager
def flags_of(tape: Tape) -> Iterator[None]:
    """Within, the numeric settings are those of the tape's forward."""
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
    """A rebuild would start from a version that was changed after the forward. The engine turns this into an error with a name.

    version: the version.

    Remedy: as of ModifiedError.
    """

    def __init__(self, version: Version) -> None:
        super().__init__(f"a tensor of {version.nbytes} bytes that a rebuild starts from was changed after the forward")
        self.version = version


def checksum(t: torch.Tensor) -> tuple[int, int]:
    """(weighted sum of the 8-byte words of a tensor's storage, the bytes after the last whole word).

    The sum is exact modulo 2^64, and the same on every device. The weight of a word depends on its position, so swapping two
    words changes the sum. NaN payloads and signs of zeros count, too.
    """
    bits = bytes_of(t)
    whole = bits.numel() // 8 * 8
    tail = int.from_bytes(bytes(bits[whole:].tolist()), "little") if whole < bits.numel() else 0
    weights = checksum_weights(t.device)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for words in bits[:whole].view(torch.int64).split(weights.numel()):
        of_chunk = weights[: words.numel()]
        # only on the CPU torch has a dot product of integers, which needs no memory
        total.mul_(_STEP).add_(torch.dot(words, of_chunk) if t.is_cpu else (words * of_chunk).sum())
    return int(total.item()), tail


def mismatch(op: str, nbytes: int) -> RebuildMismatchError:
    """The error for a rebuild that gave other bits."""
    return RebuildMismatchError(
        f"{op} was run again to rebuild {nbytes} bytes and gave other bits than the first time. Nothing has been updated "
        f"in this step. Mark it with register_op({op}, 'opaque'), so that its result is kept."
    )


def missing(version: Version) -> bool:
    """Whether a rebuild that reads the version must make it first. Fetches it if it is parked bit-identically.

    A changed value is dropped if it can be rebuilt (R7); otherwise raises StartChangedError (R5). Raises NotGatheredError for a
    sharded weight that is not gathered.
    """
    holding = version.holding
    if holding.value is None:
        return not holding.fetch()
    if version.parameter and version.nbytes and not holding.value.untyped_storage().nbytes():
        raise NotGatheredError(
            f"A rebuild needs a sharded weight of {version.nbytes} bytes while it is away. Nothing has been updated in this "
            "step. Was backward run in another order than in the observed steps? Set MEMOPT_DISABLE=1 to train without a plan."
        )
    if holding.intact and holding.value.untyped_storage().nbytes() >= version.nbytes:
        return False
    if not rebuildable(version):
        raise StartChangedError(version)
    holding.drop()
    return True


def closure(versions: Versions, targets: Iterable[Version]) -> list[Call]:
    """The calls to run, in op order, to give every target a value (R6: without recursion).

    Raises UnsupportedError if that is impossible.
    """
    calls: dict[int, Call] = {}
    wanted = [version for version in targets if missing(version)]
    seen = {version.id for version in wanted}
    while wanted:
        version = wanted.pop()
        call = version.call
        if call is None or not call.repeats:
            raise UnsupportedError(
                f"backward needs {version.nbytes} bytes that were let go as the plan says and that "
                + (f"{call.func.name()} cannot make again" if call else f"no op can make again ({version.why})")
                + ". Was backward run more often than in the observed steps? Observe such a step, or raise the budget."
            )
        if call.op in calls:
            continue
        calls[call.op] = call
        for id in call.reads:
            source = versions[id]
            if source.id not in seen and missing(source):
                seen.add(source.id)
                wanted.append(source)
    return [calls[op] for op in sorted(calls)]


def rebuild(tape: Tape[Holding], targets: list[Version], retains: Callable[[Version], bool], ran: list[int]) -> None:
    """Give every target a value. Other versions that are made on the way stay if `retains` says so; otherwise they are dropped
    after their last use. Appends the numbers of the calls that ran to `ran`. Out of memory, all targets are missing as before.
    """
    versions = tape.versions
    calls = closure(versions, targets)
    wanted = {version.id for version in targets}
    last = {versions[id].id: call.op for call in calls for id in call.reads}
    fresh: set[int] = set()

    def needed(version: Version) -> bool:
        return version.id in wanted or last.get(version.id, -1) > op or retains(version)

    with below_autograd(), flags_of(tape):
        for call in calls:
            op = call.op
            made = [versions[id] for _, id in (*call.made, *call.mutates)]
            fresh.update(version.id for version in made if version.holding.value is None)
            try:
                run(call, versions, lambda version: version.id not in fresh or needed(version))
            except torch.OutOfMemoryError:  # leave all as it was: the caller may try again
                for id in fresh:
                    versions[id].holding.drop()
                raise
            ran.append(op)
            for version in made + [versions[id] for id in call.reads]:
                if version.id in fresh and not needed(version):
                    version.holding.drop()


def compare(version: Version, then: tuple[int, int] | None) -> None:
    """R8: raise RebuildMismatchError if the version's bytes do not have the checksum `then` of the dropped bytes."""
    value = version.holding.value
    if then is not None and value is not None:
        with below_autograd():
            now = checksum(value)
        if now != then:
            raise mismatch(version.call.func.name() if version.call is not None else "an op", version.nbytes)


@cache
def _drawing_from_a_generator(func: OpOverload) -> OpOverload | None:
    """The overload that draws the same numbers from a generator argument. This may be `func` itself. None if there is none."""
    packet, name = func._overloadpacket, func._overloadname
    names = (name, "generator" if name == "default" else f"{name}_generator", f"generator_{name}")
    for overload in (getattr(packet, n) for n in names if n in packet.overloads()):
        taken = {a.name: str(a.type) for a in overload._schema.arguments}
        own = {a.name: str(a.type) for a in func._schema.arguments}
        if "generator" in taken and {**own, "generator": ""} == {**taken, "generator": ""}:
            return overload
    return None


def prepared(call: Call, random: bool) -> object:
    """The native engine's form of a call, for any step; None if the call runs in Python. `random`: whether the call has another
    generator state in each step.
    """
    engine = loaded()
    if engine is None:
        return None
    func = (_drawing_from_a_generator(call.func) if random else None) or call.func
    return engine.prepare(func._schema.name, func._schema.overload_name, call.args, call.kwargs)


def _draw(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op so that it draws the same numbers as in the forward.

    It draws from a new generator, because other threads may draw from the forward's. Only an op that takes no generator
    argument draws from the forward's, which then has the recorded state for the time of the call.
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


def _restored(v: Any, versions: Versions, fresh: dict[int, torch.Tensor]) -> Any:
    """An argument of a call, with tensors instead of views. Not a closure, because a recursive closure is a reference cycle."""
    if isinstance(v, View):
        base = fresh.get(v.version) if fresh else None
        if base is None:
            base = versions[v.version].holding.value
            assert base is not None
        return v.on(base)
    if type(v) is list:
        return [_restored(x, versions, fresh) for x in v]
    return v


def run(call: Call, versions: Versions, survives: Callable[[Version], bool]) -> None:
    """Run a call on the values of the versions that it reads, and set the values of the versions that it makes. Call within
    `below_autograd`.

    `survives` says whether the bytes of a mutated input are still needed. If so, the call mutates a copy.
    """
    if call.prepared is not None and loaded().run(call, versions, survives):
        return
    fresh: dict[int, torch.Tensor] = {}
    for id in call.reads:
        in_order(versions[id].holding)
    for id, _ in call.mutates:
        if id in fresh:
            continue
        old = versions[id]
        base = old.holding.value
        assert base is not None
        fresh[id] = copy_of(base) if survives(old) else base

    args = [_restored(a, versions, fresh) for a in call.args]
    kwargs = {k: _restored(v, versions, fresh) for k, v in call.kwargs.items()}
    set_grad_enabled(call.grad)  # the engine's threads, and `below_autograd`, restore it
    out = call.func._op(*args, **kwargs) if call.rng is None else _draw(call, args, kwargs)
    if call.made:
        outs = tensors_in(out)
        for index, id in call.made:
            made = versions.get(id)
            if made is not None and made.holding.value is None:
                made.holding.rebuilt(outs[index], current_stream(outs[index].device))
    for old_id, new_id in call.mutates:
        old, new = versions[old_id], versions.get(new_id)
        if new is not None:
            new.holding.rebuilt(fresh[old_id], old.holding.stream)
        if fresh[old_id] is old.holding.value:
            old.holding.drop()
