"""What the sweeps over torch's own tables have in common: one call run plainly and with everything droppable dropped, compared.

"Equal" means: outputs, gradients of all differentiable inputs and the generator's next draw, bit by bit. Inputs go through a
recorded op first, so that they are droppable too; outputs are not held, so that a rebuild cannot borrow them.
"""

from __future__ import annotations

import collections
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memopt.record import OpRecord
from tests.cpu.lib.harness import draws, dropping, same_bits

if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    # torch's tables import it for their own tests; nothing here uses it
    _stub: Any = types.ModuleType("expecttest")
    _stub.TestCase, _stub.ACCEPT = unittest.TestCase, False
    sys.modules["expecttest"] = _stub

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


def dense(t: torch.Tensor) -> torch.Tensor:
    return t.to_dense() if t.layout is not torch.strided else t


def seed_of(t: torch.Tensor) -> torch.Tensor:
    """What backward starts from: irregular numbers that no generator was asked for."""
    steps = torch.arange(1, t.numel() + 1, dtype=torch.float64, device=t.device)
    return torch.frac(steps * 0.7548776662466927).sub(0.4).reshape(t.shape).to(t.dtype)


def poison() -> None:
    """Leave rubbish in freed memory, so that cells which no kernel writes differ from one run to the next."""
    for device in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
        rubbish = [torch.full((n,), 0x7B, dtype=torch.uint8, device=device) for n in range(8, 1032, 16) for _ in range(3)]
        del rubbish


def run(call: Callable[..., Any], inputs: Any, *, drop: bool, where: str, leaves: list[torch.Tensor] | None = None) -> Ran:
    """`call(*inputs)` forward and backward, from a fixed state of the generator."""
    torch.manual_seed(7)
    fresh = tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)
    wanted = [t for t in tree_flatten(fresh)[0] if isinstance(t, torch.Tensor) and t.requires_grad] + (leaves or [])

    def forward() -> list[torch.Tensor]:
        # clones on both sides: what goes in is recorded, what comes out is not held
        out = call(*tree_map_only(torch.Tensor, lambda t: t.clone(), fresh))
        return [dense(t).clone() for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    dropped, rebuilt = 0, []
    if drop:
        with dropping() as engine:
            told = engine.recorded

            def recorded(record: OpRecord) -> None:
                met[record.func].add(where)
                told(record)

            engine.recorded = recorded  # type: ignore[method-assign]
            out = forward()
        dropped, rebuilt = engine.evictions, engine.rebuilt_ops
        poison()
    else:
        out = forward()
    roots = [t for t in out if t.requires_grad]
    grads: list[torch.Tensor | None] = []
    if roots and wanted:
        found = torch.autograd.grad(roots, wanted, [seed_of(t) for t in roots], allow_unused=True)
        grads = [None if g is None else dense(g) for g in found]
    return Ran([t.detach() for t in out], grads, draws(), dropped=dropped, rebuilt=len(set(rebuilt)))


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
    judge(lambda: [once(False)], lambda: [once(True)], lambda ran: bool(ran.dropped and ran.rebuilt), name, count)


def judge(
    plain: Callable[[], list[Ran]], rebuilt: Callable[[], list[Ran]], drops: Callable[[Ran], bool], name: str, count: Count
) -> None:
    """The plain steps twice, then the rebuilt ones; the entry goes where it belongs. `drops`: whether the last step did."""
    try:
        expected = plain()
        poison()
        unlike = _unlike(expected, plain())
    except Exception as error:
        count.skipped[name] = f"broken in plain: {type(error).__name__}"
        return
    if unlike:
        count.skipped[name] = f"not the same twice in plain: {unlike}"
        return
    try:
        found = rebuilt()
    except Exception as error:
        count.different[name] = f"{type(error).__name__}: {error}"[:300]
        return
    unlike = _unlike(expected, found)
    if unlike:
        count.different[name] = unlike
    else:
        (count.dropped if drops(found[-1]) else count.nothing).append(name)


def _unlike(some: list[Ran], others: list[Ran]) -> str:
    """Where the first step that differs does, or nothing."""
    return next((f"step {i}: {d}" for i, d in enumerate(map(difference, some, others)) if d), "")


def sweep(entries: Iterable[Any], one: Callable[[Any, Count], None]) -> Count:
    """Verdicts over entries of a table; `one(entry, count)` adds those of one of them."""
    count = Count()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for entry in entries:
                one(entry, count)
    finally:
        torch.set_num_threads(threads)
    return count


def assert_none_differs(count: Count) -> None:
    assert not count.different, "\n".join(f"{name}: {why}" for name, why in count.different.items())


def total(counts: Iterable[Count]) -> Count:
    """All of them in one."""
    found = Count()
    for count in counts:
        found.dropped += count.dropped
        found.nothing += count.nothing
        found.skipped |= count.skipped
        found.different |= count.different
    return found
