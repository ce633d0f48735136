"""Under budget="min", a batch longer than all before takes a part of what its unmodified step takes, from its first step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.session.judge.states import Observing, Running, Waiting
from tests.cpu.lib.inside import current_of, states_of
from tests.cpu.lib.loops import assert_same, state
from tests.cpu.session.test_plan_cache import WORDS, Attending, adamw, words

ONCE: dict[str, Any] = dict(verbose=False, profile_steps=1)


class Recurrent(nn.Module):
    """One cell for each word, so a longer batch runs more ops."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        h, outs = e.new_zeros(len(x), e.shape[2]), []
        for t in range(x.shape[1]):
            h = self.cell(e[:, t], h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return Attending(width=32)


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent()


def trained(build: Callable[[], nn.Module], data: list[Tensor], **options: Any) -> tuple[list[int], list[Any], Any, Any]:
    """(peaks above what was held before, kinds of states, the parameters, the states) of steps on these batches, by the counter
    of torch's allocator. Without options, they are plain.
    """
    counts = counter()
    if counts is None:
        pytest.skip("without a compiler, nothing counts the bytes of a step")
    model = build()
    optimizer = adamw(model)
    peaks: list[int] = []
    kinds: list[Any] = []
    torch.manual_seed(4)

    def steps(run: Any = None) -> None:
        window = counts.window()
        assert window is not None
        for x in data:
            before = counts.live_nbytes
            window.reset()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            kinds.append(type(current_of(run)) if run is not None else None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            peaks.append(window.peak_nbytes - before)
        window.close()

    if not options:
        steps()
        return peaks, kinds, state(model), None
    with optimize(model, optimizer, **ONCE, **options) as run:
        steps(run)
        return peaks, kinds, state(model), dict(states_of(run))


def stretched(found: Any) -> bool:
    """Whether the state has the plan of a smaller batch, with its prediction for this one."""
    return isinstance(found, Running) and found.lender is not None and found.plan is not found.lender.plan


def test_a_longer_batch_borrows_a_plan() -> None:
    """Once two lengths have shown that the ops are the same, a longer one borrows, and takes about what its own plan takes."""
    lengths = [32, 32, 48, 48, 56, 64, 72, 96]
    data = [words(8, n, seed=n) for n in lengths]
    plain, _, expected, _ = trained(wide, data)
    peaks, kinds, found, states = trained(wide, data, budget="min")
    assert_same(expected, found)
    assert kinds == [Observing, Running, Observing, *[Running] * 4, Observing], "96 is far from 48, and may have its own"
    own, _, _, _ = trained(wide, [data[6]] * 2, budget="min")
    for longer, (peak, unmodified) in enumerate(zip(peaks, plain, strict=True)):
        assert longer < 2 or peak < 0.5 * unmodified, (lengths[longer], peak, unmodified)
    assert peaks[6] < 1.2 * own[1]
    lent = [s for s in states.values() if isinstance(s, Running) and s.lender is not None]
    assert len(lent) == 3 and all(stretched(s) and not s.drift.deviated for s in lent)
    predicted = [s.plan.predicted_peak_nbytes for s in lent]
    assert predicted == sorted(set(predicted)), "the prediction grows with the batch"


def test_a_longer_loop_is_kept_near_the_bytes_of_a_plan() -> None:
    """A longer batch runs more cells than any plan knows. Eviction lowers the peak of its step."""
    lengths = [6, 6, 9, 12, 15]
    data = [words(128, n, seed=n) for n in lengths]
    plain, _, expected, _ = trained(recurrent, data)
    peaks, kinds, found, states = trained(recurrent, data, budget="min")
    assert_same(expected, found)
    assert not any(s.lender for s in states.values() if isinstance(s, Running)) and set(kinds[2:]) <= {Observing, Waiting}
    for peak, unmodified in zip(peaks[2:], plain[2:], strict=True):
        assert peak < 0.85 * unmodified


def test_within_a_budget_longer_batches_are_observed_as_before() -> None:
    """Nothing is borrowed from a shorter batch where the budget has no room for it."""
    data = [words(8, n, seed=n) for n in (32, 32, 40, 40, 48, 48)]
    plain, _, expected, _ = trained(wide, data)
    _, kinds, found, states = trained(wide, data, budget=int(0.9 * max(plain)))
    assert_same(expected, found)
    assert not any(map(stretched, states.values()))
    assert Observing in kinds[2:]


def test_where_rebuilding_is_too_slow_longer_batches_keep_all() -> None:
    """With `max_slowdown=1` the first plan keeps everything. A longer batch does not borrow it, and nothing is evicted."""
    data = [words(8, n, seed=n) for n in (32, 32, 48, 48)]
    plain, _, expected, _ = trained(wide, data)
    peaks, _, found, states = trained(wide, data, budget="min", max_slowdown=1.0)
    assert_same(expected, found)
    assert all(s.program.empty for s in states.values() if isinstance(s, Running))
    assert peaks[2] > 0.9 * plain[2] and not any(map(stretched, states.values()))
