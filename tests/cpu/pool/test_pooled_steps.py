"""Training in the planned pool: the bits of a run without it, every request served as planned, and nothing left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.errors import ConfigError
from lightning_memopt.native import counter, install
from lightning_memopt.plan import wrong_addresses
from lightning_memopt.report.table import pool_text
from tests.cpu.lib.pooled import ROWS, F, arenas_nbytes, as_planned, batch, both, plain_step, trained, training

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


def zeroed_first(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def zeroed_last(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    for _ in range(3):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 3).backward()
    optimizer.step()


def under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


LOOPS = [plain_step, zeroed_first, zeroed_last, zeroed_in_place, accumulated, under_autocast]


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_every_loop_has_the_bits_of_the_ordinary_allocator(step: Any) -> None:
    status = both(step)
    as_planned(status)
    assert status.addresses is not None and status.addresses.fragmentation < 0.05
    assert status.addresses.planned > 0.9 * len(status.addresses.nbytes)
    assert "0 fell through" in pool_text(status)
    gc.collect()
    assert arenas_nbytes() == 0, "nothing of the step is alive, and with it went the arena"


@pytest.mark.parametrize("optimizer_in_backward", ["never", "auto"])
def test_within_a_budget_that_rebuilds(optimizer_in_backward: str) -> None:
    """The requests of the planned step are not those of the observed one: the pool is planned from the planned step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
        x, y = batch(512)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    count = counter()
    assert count is not None
    held = count.live_nbytes
    status = both(step, budget=held + 2_300_000, optimizer_in_backward=optimizer_in_backward)
    as_planned(status)


def test_the_smallest_budget_has_room_for_the_arena() -> None:
    """Gradients live through the next forward. They and the forward share the arena, so both fit the smallest budget."""
    as_planned(both(budget="min"))


def test_two_signatures_share_one_arena() -> None:
    """Two shapes of batches take turns; the smaller one borrows the plan of the larger one, and has addresses of its own."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch(ROWS if i % 4 < 2 else ROWS // 2)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with training(True) as (run, model, optimizer):
        sizes = set()
        for i in range(28):
            step(model, optimizer, i)
            sizes.add(arenas_nbytes())
        run.session.pool.rests()
        status = run.status().pool
        assert status is not None and status.addresses is not None
        planned = [s.plan.addresses for s in run.session.pool._windows._signatures.values()]  # type: ignore[union-attr]
        assert len(planned) == 2
        assert sizes == {0, status.addresses.arena_nbytes} == {0, max(a.arena_nbytes for a in planned)}
    assert status.total.fallen == 0 and status.steps > 12
    both(step, steps=28)


def test_500_steps_take_no_more_than_20() -> None:
    count = counter()
    assert count is not None
    seen = []
    with training(True, nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))) as (run, model, optimizer):
        for i in range(500):
            zeroed_last(model, optimizer, i)
            if i in (20, 499):
                seen.append((count.live_nbytes, arenas_nbytes()))
        run.session.pool.rests()
        status = run.status().pool
    assert status is not None and seen[0] == seen[1]
    as_planned(status)
    assert status.steps > 480


@pytest.mark.calling_thread("the pool of the CPU serves the thread that begins a step (on CUDA it serves streams)")
def test_a_step_in_the_pool_takes_nothing_outside() -> None:
    """By the native meter: what a planned step allocates beyond its arena is the batch, which lives as long as a step."""
    count = counter()
    assert count is not None
    with training(True) as (_, model, optimizer):
        for i in range(8):
            zeroed_last(model, optimizer, i)
        x, y = batch()
        window = count.window(outside=True)
        assert window is not None
        began = window.reset()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert window.peak_nbytes == began
        window.close()


def test_torchs_profiler_sees_the_tensors_of_the_arena() -> None:
    with training(True) as (_, model, optimizer):
        for i in range(8):
            zeroed_last(model, optimizer, i)
        with torch.profiler.profile(profile_memory=True) as profiler:
            zeroed_last(model, optimizer, 8)
    assert sum(max(0, event.cpu_memory_usage) for event in profiler.key_averages()) > ROWS * 128 * 4


def test_what_pool_accepts() -> None:
    with pytest.raises(ConfigError, match="pool is 'yes'; use 'planned' or None"):
        trained(True, steps=1, pool="yes")


def test_a_tensor_is_aligned_as_the_ordinary_allocator_aligns_it() -> None:
    seen: list[Tensor] = []
    with training(True) as (_run, model, optimizer):
        for _ in range(10):
            x, y = batch()
            seen[:] = [model(x)]
            F.cross_entropy(seen[0], y).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert seen[0].data_ptr() % 64 == 0


def test_a_plan_has_the_addresses_and_a_run_that_is_given_it_logs_no_step(tmp_path: Path) -> None:
    lines: list[str] = []
    with training(True) as (run, model, optimizer):
        for i in range(8):
            plain_step(model, optimizer, i)
        run.session.pool.rests()
        plan, pool = run.status().plan, run.status().pool
        assert plan is not None and pool is not None and plan.addresses is not None and plan.addresses == pool.addresses
        assert wrong_addresses(plan.addresses) == []
        run.save_plan(str(tmp_path / "plan.json"))
        expected = [t.clone() for t in model.state_dict().values()]
    with training(True, plan=str(tmp_path / "plan.json")) as (run, model, optimizer):
        run.session.say = lines.append
        for i in range(8):
            plain_step(model, optimizer, i)
        run.session.pool.rests()
        status = run.status().pool
        assert status is not None and status.addresses == plan.addresses
        assert status.steps >= 7 and status.last.fallen == 0 and status.last.served > 0
        assert all(torch.equal(a, b) for a, b in zip(expected, model.state_dict().values(), strict=True))


def test_addresses_that_the_budget_has_no_room_for_are_solved_again() -> None:
    with training(True) as (run, model, optimizer):
        for i in range(8):
            plain_step(model, optimizer, i)
        plan = run.status().plan
        assert plan is not None and plan.addresses is not None
        windows = run.session.pool._windows
        key, other = object.__new__(Key), object.__new__(Key)
        windows.rests()
        windows.begins(key, plan.addresses.needed_nbytes - 1, plan.addresses)
        windows.rests()
        windows.begins(other, plan.addresses.needed_nbytes, plan.addresses)
        windows.rests()
        known = {k: s.plan is not None for k, s in windows._signatures.items() if k in (key, other)}
        assert known == {key: False, other: True}


class Key:
    """Stands for the state of a signature."""
