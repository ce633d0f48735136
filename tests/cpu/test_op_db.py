"""Exactness over torch's own table of operators: every sample, plain and with everything droppable dropped.

"Equal" means: outputs, gradients of all differentiable inputs and the generator's next draw, bit by bit. Inputs go through a
recorded op first, so that they are droppable too; outputs are not held, so that a rebuild cannot borrow them.

`python -m tests.cpu.test_op_db` prints the table of docs/opaque.md.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memopt.record import rule_of
from tests.cpu.harness import dropping, same_bits

if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    # torch's tables import it for their own tests; nothing here uses it
    _stub: Any = types.ModuleType("expecttest")
    _stub.TestCase, _stub.ACCEPT = unittest.TestCase, False
    sys.modules["expecttest"] = _stub

from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = {torch.float32: 3, torch.complex64: 2}
"""How many samples of an operator are run; of what networks are made of, more."""
SAMPLES_OF_FUNCTIONAL = 8
# Cells that no kernel writes: two plain runs agree only where the allocator hands out the same bytes twice.
UNINITIALISED = {
    "empty": "returns memory as it is",
    "empty_like": "returns memory as it is",
    "empty_permuted": "returns memory as it is",
    "empty_strided": "returns memory as it is",
    "new_empty": "returns memory as it is",
    "new_empty_strided": "returns memory as it is",
    "linalg.lstsq": "returns cells that LAPACK does not write",
}

met: dict[torch._ops.OpOverload, set[str]] = collections.defaultdict(set)
"""The aten ops met while sweeping, and under which entries."""


@dataclass
class Ran:
    """What one run left behind."""

    out: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    draw: torch.Tensor
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: int = 0
    rebuilt: int = 0


@dataclass
class Count:
    """Verdicts over a chunk, as names of entries."""

    dropped: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)

    def add(self, other: Count) -> None:
        self.dropped += other.dropped
        self.nothing += other.nothing
        self.skipped |= other.skipped
        self.different |= other.different


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t.to_dense() if t.layout is not torch.strided else t


def _seed_of(t: torch.Tensor) -> torch.Tensor:
    """What backward starts from: irregular numbers that no generator was asked for."""
    steps = torch.arange(1, t.numel() + 1, dtype=torch.float64)
    return torch.frac(steps * 0.7548776662466927).sub(0.4).reshape(t.shape).to(t.dtype)


def poison() -> None:
    """Leave rubbish in freed memory, so that cells which no kernel writes differ from one run to the next."""
    rubbish = [torch.full((n,), 0x7B, dtype=torch.uint8) for n in range(8, 1032, 16) for _ in range(3)]
    del rubbish


def run(call: Callable[..., Any], inputs: Any, *, drop: bool, where: str, leaves: list[torch.Tensor] | None = None) -> Ran:
    """`call(*inputs)` forward and backward, from a fixed state of the generator."""
    torch.manual_seed(7)
    fresh = tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)
    wanted = [t for t in tree_flatten(fresh)[0] if isinstance(t, torch.Tensor) and t.requires_grad] + (leaves or [])

    def forward() -> list[torch.Tensor]:
        # clones on both sides: what goes in is recorded, what comes out is not held
        out = call(*tree_map_only(torch.Tensor, lambda t: t.clone(), fresh))
        return [_dense(t).clone() for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    dropped, replayed = 0, []
    if drop:
        with dropping() as engine:
            told = engine.recorded

            def recorded(func: Any, reads: Any, made: Any) -> None:
                met[func].add(where)
                told(func, reads, made)

            engine.recorded = recorded  # type: ignore[method-assign]
            out = forward()
        dropped, replayed = engine.evictions, engine.replayed
        poison()
    else:
        out = forward()
    roots = [t for t in out if t.requires_grad]
    grads: list[torch.Tensor | None] = []
    if roots and wanted:
        found = torch.autograd.grad(roots, wanted, [_seed_of(t) for t in roots], allow_unused=True)
        grads = [None if g is None else _dense(g) for g in found]
    return Ran([t.detach() for t in out], grads, torch.rand(4), dropped=dropped, rebuilt=len(set(replayed)))


def difference(a: Ran, b: Ran) -> str:
    """Where two runs differ, or nothing."""
    if len(a.out) != len(b.out) or len(a.grads) != len(b.grads):
        return "structure"
    for what, xs, ys in (("output", a.out, b.out), ("gradient", a.grads, b.grads)):
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if not same_bits(x, y):
                return f"{what} {i}"
    for name, x in a.extra.items():
        if not same_bits(x, b.extra[name]):
            return name
    return "" if same_bits(a.draw, b.draw) else "state of the generator"


def verdict(once: Callable[[bool], Ran], name: str, count: Count) -> None:
    """Plain twice, then dropped; the entry goes where it belongs."""
    try:
        plain = once(False)
        poison()
        unlike = difference(plain, once(False))
    except Exception as error:
        count.skipped[name] = f"broken in plain: {type(error).__name__}"
        return
    if unlike:
        count.skipped[name] = f"not the same twice in plain: {unlike}"
        return
    try:
        replayed = once(True)
    except Exception as error:
        count.different[name] = f"{type(error).__name__}: {error}"[:300]
        return
    unlike = difference(plain, replayed)
    if unlike:
        count.different[name] = unlike
    elif replayed.dropped and replayed.rebuilt:
        count.dropped.append(name)
    else:
        count.nothing.append(name)


def _calls(op: Any, sample: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    inputs = (sample.input, sample.args, sample.kwargs)
    process = sample.output_process_fn_grad

    def out_of_place(x: Any, args: Any, kwargs: Any) -> Any:
        return process(op(x, *args, **kwargs))

    yield "", out_of_place, inputs
    inplace = op.get_inplace()
    if inplace is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:

        def in_place(x: Any, args: Any, kwargs: Any) -> Any:
            inplace(x, *args, **kwargs)
            return x

        yield "_", in_place, inputs


def _chunk(op: Any) -> str:
    head, dot, tail = op.name.rpartition(".")
    if head == "nn.functional":
        return f"nn.functional.{'a-h' if tail[0] <= 'h' else 'i-m' if tail[0] <= 'm' else 'n-z'}"
    return head if dot else op.name[0].lower().strip("_") or "_"


CHUNKS = sorted({_chunk(op) for op in op_db})


@functools.cache
def swept(chunk: str) -> Count:
    """Verdicts over the ops of one chunk."""
    count = Count()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op in op_db:
                if _chunk(op) == chunk:
                    _sweep_op(op, count)
    finally:
        torch.set_num_threads(threads)
    return count


def _sweep_op(op: Any, count: Count) -> None:
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    if op.name in UNINITIALISED:
        count.skipped[name] = UNINITIALISED[op.name]
        return
    if not op.supports_autograd:
        count.skipped[name] = "no autograd"
        return
    best = Count()
    for dtype, samples in SAMPLES.items():
        if dtype not in op.supported_dtypes("cpu") or dtype not in op.supported_backward_dtypes("cpu"):
            continue
        torch.manual_seed(3)
        for i, sample in enumerate(op.sample_inputs_func(op, "cpu", dtype, True)):  # without torch's stack traces
            if i == (SAMPLES_OF_FUNCTIONAL if op.name.startswith("nn.functional.") else samples):
                break
            for suffix, call, inputs in _calls(op, sample):
                label = f"{name}{suffix} [{str(dtype)[6:]} #{i}]"
                verdict(lambda drop, c=call, x=inputs: run(c, x, drop=drop, where=name), label, best)  # type: ignore[misc]
    if best.different:
        count.different |= best.different
    elif best.dropped:
        count.dropped.append(name)
    elif best.nothing:
        count.nothing.append(name)
    else:
        count.skipped[name] = next(iter(best.skipped.values()), "neither float32 nor complex64")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_operator_differs(chunk: str) -> None:
    count = swept(chunk)
    assert not count.different, "\n".join(f"{name}: {why}" for name, why in count.different.items())


def test_enough_was_dropped() -> None:
    total = Count()
    for chunk in CHUNKS:
        total.add(swept(chunk))
    print(
        f"equal with something dropped {len(total.dropped)}, nothing droppable {len(total.nothing)}, "
        f"not comparable {len(total.skipped)} of {len(op_db)}"
    )
    assert len(total.dropped) + len(total.nothing) + len(total.skipped) + len(total.different) >= len(op_db) - 5
    assert len(total.dropped) >= 300
    unstable = sorted(name for name, why in total.skipped.items() if why.startswith(("broken", "not the same")))
    assert len(unstable) <= 10, unstable


def opaque_table() -> str:
    """The operators met in the sweeps that are never replayed, as the table of docs/opaque.md."""
    for chunk in CHUNKS:
        swept(chunk)
    why: dict[str, set[str]] = collections.defaultdict(set)
    for func in met:
        rule = rule_of(func)
        if rule.handling == "opaque":
            why[rule.why].add(func._schema.name.partition("::")[2])
    rows = [f"| {reason} | {', '.join(f'`{name}`' for name in sorted(names))} |" for reason, names in sorted(why.items())]
    return "\n".join(["| Why | Operators |", "|---|---|", *rows])


if __name__ == "__main__":
    from tests.cpu import test_module_db, test_op_db

    for group in test_module_db.GROUPS:
        test_module_db.swept(group)
    print(test_op_db.opaque_table())
