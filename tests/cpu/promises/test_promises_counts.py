"""P9, P11: what runs again is what the plan says, op for op and FLOP for FLOP; what a step took is given back.

Replays run below every dispatch mode, so `FlopCounterMode` cannot see them: they are counted by torch's profiler, which the
dispatcher itself calls, and by no code of ours.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import flop_registry

from lightning_memopt import optimize
from lightning_memopt.plan import Rebuild as Again
from lightning_memopt.record import Tape
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import budget_at
from tests.cpu.lib.models import Body, Noisy, data, made, sgd, squares

Counts = collections.Counter[str]


def convolutions() -> nn.Module:
    layers = [
        m for i in range(3) for m in (nn.Conv2d(2 + 2 * i, 4 + 2 * i, 3), nn.BatchNorm2d(4 + 2 * i), nn.GELU(), nn.Dropout(0.2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 2 * 2, 5))


class Attention(Body):
    """Batched products and a softmax."""

    def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
        q = h.view(-1, 8, 16)
        return (torch.softmax(q @ q.transpose(1, 2), -1) @ q).reshape(h.shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "linear": (lambda: Body(16, 5), data(256, 16)),
    "random": (lambda: Noisy(16, 4), data(256, 16)),
    "attention": (lambda: Attention(16, 3), data(512, 16)),
    "convolution": (convolutions, data(16, 2, 8, 8)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    squares(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def counted(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[Counts, int]:
    """How often each op ran in the backward of one step, and the FLOPs of all of them, by torch's own formulas.

    Replays are in backward. In forward an op inside of a dispatch mode is seen twice: before and below it.
    """
    loss = squares(model, x)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    counts: Counts = collections.Counter()
    flops = 0
    for event in seen.events():
        counts[event.name] += 1
        if event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            formula = flop_registry[getattr(torch.ops.aten, event.name[6:])]
            flops += formula(*[torch.empty(s, device="meta") for s in event.input_shapes if s][:3])
    return counts, flops


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_p9_recomputes_as_planned(name: str, share: float) -> None:
    """Every op of the plan runs again exactly as often as planned, nothing else does, and FLOPs are those predicted."""
    factory, x = MODELS[name]
    plain = made(factory)
    other = sgd(plain)
    step(plain, other, x)
    expected, flops = counted(plain, other, x)
    budget: Any = "min"
    for wanted in ("min", "share"):
        model = made(factory)
        with optimize(model, o := sgd(model), budget=budget, profile_steps=1, verbose=False) as run:
            for _ in range(4):
                step(model, o, x)
            state = state_of(run)
            assert isinstance(state, Running)
            found, found_flops = counted(model, o, x)
            program, predicted = state.program, state.plan.predicted
            budget = budget_at(run, share)
        if wanted == "min" and share > 0:
            continue
        again = [s.op for segment in program.schedule.segments.values() for s in segment if isinstance(s, Again)]
        assert len(again) == predicted.rebuilt_ops
        planned = collections.Counter(program.graph.ops[op].name.partition(".")[0] for op in again)
        assert planned or share, "nothing runs again: the test tests nothing"
        names = planned.keys() | {op.name.partition(".")[0] for op in program.graph.forward if op.flops}
        for op in sorted(name for name in names if "empty" not in name):  # memory alone: made by whichever of its forms
            assert found[op] - expected[op] == planned[op], op
        if name != "convolution":
            assert found_flops - flops == predicted.extra_flops
        break


def rss_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def slope(values: list[int]) -> float:
    """Of the least-squares line through the values."""
    n, mean = len(values), sum(values) / len(values)
    middle = (n - 1) / 2
    return sum((i - middle) * (v - mean) for i, v in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))


STEPS = 1000


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_p11_a_thousand_steps_of_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the garbage collector off: no tape, and so no handle, outlives its step, and resident memory does not grow."""
    alive: dict[str, int] = collections.Counter()
    original = Tape.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if alive["watching"]:
            alive["made"] += 1
            tapes.add(self)

    monkeypatch.setattr(Tape, "__init__", init)
    tapes: weakref.WeakSet[Any] = weakref.WeakSet()
    rng = random.Random(0)
    sizes = [8 * rng.randint(1, 24) for _ in range(STEPS)]  # more sizes than there may be plans
    model = made(lambda: Noisy(8, 2))
    seen = []
    gc.collect()
    gc.disable()
    try:
        with optimize(model, o := sgd(model), budget="min", profile_steps=1, verbose=False) as run:
            for i, size in enumerate(sizes):
                alive["watching"] = i % 50 == 0
                step(model, o, data(size, 8, seed=i))
                seen.append(rss_nbytes())
                assert not tapes, f"{len(tapes)} tapes are alive after step {i}"
            assert alive["made"] >= STEPS // 50 and run.plan is not None
    finally:
        gc.enable()
    parts = seen[STEPS // 4 : 5 * STEPS // 8], seen[5 * STEPS // 8 :]
    growth = [slope(part) * len(part) for part in parts]  # a leak grows in both; the allocator may take a few pages once
    assert min(growth) < 1 << 19, f"{growth} bytes in {len(parts[0])} steps each"
