"""Searching for a batch size on a device of limited size: the size, trials, everything as it was. Ids: hazards.md, L, P27."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from tests.cpu.lib.limits import Device
from tests.cpu.lib.loops import QUIET, installed
from tests.cpu.lib.searches import BUDGET, Plain, Square, Words, same

pytestmark = pytest.mark.profiled  # their budgets are those of a process that holds nothing else


def true_maximum(limit: int, low: int, high: int) -> int:
    """The largest size whose steps in the steady state fit a device with this many bytes, found by trying every size."""
    fitting = []
    for size in range(low, high):
        words = Words()
        device = Device(limit, [words.model])
        try:
            with device:
                for n in (2, size, size):
                    words.step(words.make(n))
        except torch.OutOfMemoryError:
            break
        fitting.append(size)
    assert fitting and fitting[-1] < high - 1, "the device was never full: the test tests nothing"
    return fitting[-1]


def test_l1_the_size_is_within_2_percent_of_exhaustive_search_and_then_trains() -> None:
    """One trial step beyond the profile, no OOM on the device meanwhile, and none in the training that follows."""
    words = Words()
    device = Device(BUDGET, [words.model])
    with device:
        found = words.find()
        for _ in range(3):
            words.step(words.make(found.size))
    assert device.errors == 0
    assert (found.trial_steps, found.profile_steps) == (1, 3)
    assert found.confirmed_peak_nbytes == pytest.approx(found.predicted_peak_nbytes, rel=0.01)
    assert found.confirmed_peak_nbytes <= BUDGET
    true = true_maximum(BUDGET, found.size - 1, found.size + 4)
    assert true / 1.02 - 1 < found.size <= true


def test_l1_with_plans_the_budget_holds_a_larger_one_and_keeps_it_in_training() -> None:
    words = Words()
    plain = words.find().size
    found = words.find(planned=True)
    assert found.size > 1.5 * plain and found.planned and found.trial_steps == 2
    assert found.confirmed_peak_nbytes <= BUDGET
    with optimize(words.model, words.optimizer, budget=BUDGET, **QUIET) as run:
        for _ in range(4):
            words.step(words.make(found.size))
    assert run.status().measured_peak_nbytes <= BUDGET
    with pytest.raises(InfeasibleError):
        with optimize(words.model, words.optimizer, budget=BUDGET, **QUIET):
            for _ in range(4):
                words.step(words.make(int(found.size * 1.02) + 2))


def test_p27_everything_is_as_it_was_and_training_goes_on_as_if_nothing_had_been() -> None:
    runs = []
    for search in (False, True):
        words = Words()
        torch.manual_seed(5)
        words.step(words.make(8))  # there is optimizer state, and generators have moved
        if search:
            before, objects = words.state(), [id(p) for p in words.model.parameters()]
            for planned in (False, True):
                words.find(planned=planned)
                assert same(before, words.state())
            assert objects == [id(p) for p in words.model.parameters()]
        for _ in range(3):
            words.step(words.make(16))
        runs.append(words.state())
    assert same(*runs)


def test_p27_no_optimizer_state_is_left_where_there_was_none() -> None:
    words = Words()
    words.find()
    assert not words.optimizer.state and words.optimizer.state_dict()["state"] == {}
    assert all(p.grad is None for p in words.model.parameters())


def test_what_the_fit_did_not_see_is_found_by_bisection() -> None:
    """The prediction fails in a real step on a device that is full; what remains is found with real steps."""
    plain = Plain(Square())
    device = Device(120_000, [plain.model])
    with device:
        found = plain.find(budget=120_000)
    assert "were predicted" in found.why or "ran out" in found.why
    assert found.confirmed_peak_nbytes <= 120_000

    def fits(size: int) -> bool:
        try:
            with Device(120_000, [plain.model]):
                plain.step(torch.randn(size, 8))
        except torch.OutOfMemoryError:
            plain.optimizer.zero_grad()
            return False
        return True

    true = max(size for size in range(found.size, found.size + 8) if fits(size))
    assert true < found.size + 7
    assert true / 1.03 - 1 < found.size <= true


def test_p27_after_running_out_of_memory_live_bytes_are_those_of_the_start() -> None:
    """With the garbage collector off: what a failed trial made is freed by who ran it."""
    plain = Plain(Square())
    device = Device(120_000, [plain.model])
    with device:
        plain.step(torch.randn(4, 8))
        before, hooks = device.live_nbytes(), installed()
        plain.find(budget=120_000)
        assert device.errors > 0, "memory never ran out: the test tests nothing"
        gc.disable()
        try:
            assert device.live_nbytes() == before
        finally:
            gc.enable()
    assert [str(h) for h in installed()[2:]] == [str(h) for h in hooks[2:]]


def test_steps_that_are_another_one_at_every_size_are_bisected() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(len(x)):
                x = self.linear(x).tanh()
            return x.square().mean()

    plain = Plain(Depth())
    found = plain.find(budget=60_000)
    assert "depends on the batch size" in found.why or "ops" in found.why
    assert found.predicted_peak_nbytes is None and found.confirmed_peak_nbytes <= 60_000
    assert set(plain.tried) > {found.size}


def test_l2_where_not_even_one_sample_fits_the_error_says_so_and_nothing_has_changed() -> None:
    words = Words()
    words.step(words.make(4))
    before = words.state()
    device = Device(BUDGET, [words.model])
    with device:
        device.limit_nbytes = device.live_nbytes() + 100
        with pytest.raises(InfeasibleError, match=r"not even a batch of 1 fits \(tried 4, 2, 1\)"):
            words.find()
    assert same(before, words.state())
    with pytest.raises(InfeasibleError, match="No batch size fits 20000 bytes"):
        words.find(budget=20_000, planned=True)
    assert same(before, words.state())


def test_l2_other_errors_are_raised_as_they_are_and_nothing_has_changed() -> None:
    class Mine(Exception):
        pass

    plain = Plain(Square(), lambda n: Mine("no") if n == 4 else None)
    before = [p.clone() for p in plain.model.parameters()]
    with pytest.raises(Mine):
        plain.find(budget=200_000)
    assert same(before, [p.detach() for p in plain.model.parameters()])
    interrupt = Plain(Square(), lambda n: KeyboardInterrupt() if n == 4 else None)
    with pytest.raises(KeyboardInterrupt):
        interrupt.find(budget=200_000, planned=True)
    assert not interrupt.optimizer.state
