"""Steps on CUDA streams through the windows of a run: logged, planned, served, and refused where the budget has no room."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_memopt import native
from lightning_memopt.config import MemOptConfig
from lightning_memopt.cxx import BuildError
from lightning_memopt.native import CUDA_ALIGNMENT
from lightning_memopt.report.table import pool_text
from lightning_memopt.runtime.pool import PoolStatus, StreamWindows
from lightning_memopt.session.pooling import _Solver
from tests.cpu.lib.pooled import plain_step, training
from tests.cpu.pool.cuda.fake import Fake

SIDE = 31
BUDGET = 1 << 20


class Signature:
    pass


class Steps:
    """A loop: each step holds three buffers at once on the main stream and two on another, and one lives into the next step."""

    def __init__(self, cuda: Fake) -> None:
        self.cuda, self.said, self.key = cuda, list[str](), Signature()
        self.held: list[int] = []
        solver = _Solver(MemOptConfig(budget=BUDGET), CUDA_ALIGNMENT, reserves=True).saying
        self.windows = StreamWindows(cuda.allocator, 0, cuda.pool(0), solver, self.said.append)

    def step(self, scale: int = 1, budget_nbytes: int = BUDGET) -> None:
        cuda = self.cuda
        self.windows.begins(self.key, budget_nbytes)
        a, b = cuda.allocate(1000 * scale), cuda.allocate(2000 * scale)
        self.release()
        cuda.on(0, SIDE)
        c, d = cuda.allocate(300), cuda.allocate(5000)
        cuda.delete(c)
        cuda.on(0, 0)
        cuda.record_stream(b, SIDE)
        cuda.delete(b)
        self.held = [cuda.allocate(1500)]
        cuda.delete(a)
        cuda.delete(d)

    def release(self) -> None:
        for handle in self.held:
            self.cuda.delete(handle)
        self.held = []

    def close(self) -> PoolStatus:
        self.windows.close()
        self.release()
        return self.windows.status()


def test_each_stream_of_a_step_is_planned(cuda: Fake) -> None:
    steps = Steps(cuda)
    for _ in range(12):
        steps.step()
    main, side = cuda.pool(0), cuda.pool(SIDE)
    assert main.counts().served == 3 and side.counts().served == 2
    assert cuda.blocks() == 2, "nothing is outside of the two arenas"
    assert cuda.live(0) == main.arenas_nbytes()[0] + side.arenas_nbytes()[0]
    status = steps.close()
    assert status.reason is None and status.deviating == 0 and status.last.fallen == 0
    assert status.last.served == 5 and status.steps >= 6
    assert status.addresses is not None and all(offset is None or offset % 512 == 0 for offset in status.addresses.offsets)
    assert status.addresses.arena_nbytes == status.addresses.max_live_nbytes
    assert sum("planned pool in force" in line for line in steps.said) == 2
    assert any(f"CUDA stream {side.number}: planned pool in force" in line for line in steps.said)


def test_memory_that_outlives_the_run_keeps_the_arena(cuda: Fake) -> None:
    steps = Steps(cuda)
    for _ in range(8):
        steps.step()
    steps.windows.close()
    assert cuda.blocks() == 1, "the main stream's arena has a buffer"
    steps.release()
    assert cuda.blocks() == 0


def test_the_budget_is_kept_from_the_arenas_first_step(cuda: Fake) -> None:
    """Of 10 KiB, 8 live into the next step: beside the new arena, those of the logged step are still there. Budgets with room
    for both have a pool, smaller ones none; all are kept.
    """
    planned = list[int]()
    for budget_nbytes in range(9 * 1024, 22 * 1024, 512):
        steps = Steps(cuda)
        cuda.reset_peak()
        for _ in range(6):
            steps.windows.begins(steps.key, budget_nbytes)
            first = cuda.allocate(1024)
            steps.release()
            steps.held = [cuda.allocate(8192)]
            cuda.delete(first)
        if steps.windows.status().reason is None:
            planned.append(budget_nbytes)
        assert cuda.reset_peak() <= budget_nbytes, (budget_nbytes, steps.said)
        steps.close()
    assert planned and min(planned) <= 18 * 1024


def test_the_budget_counts_the_arenas_of_all_streams(cuda: Fake) -> None:
    planned = list[int]()
    for budget_nbytes in range(12 * 1024, 34 * 1024, 1024):
        steps = Steps(cuda)
        cuda.reset_peak()
        for _ in range(9):
            steps.windows.begins(steps.key, budget_nbytes)
            first = cuda.allocate(4096)
            cuda.on(0, SIDE)
            cuda.delete(cuda.allocate(6144))
            cuda.on(0, 0)
            cuda.delete(first)
            cuda.delete(cuda.allocate(12 * 1024))
        planned += [budget_nbytes] * sum("in force" in line for line in steps.said)
        assert cuda.reset_peak() <= budget_nbytes, (budget_nbytes, steps.said)
        steps.close()
    assert planned.count(33 * 1024) == 2, "with room for both arenas both are there"
    assert cuda.pool(0).others_nbytes() == 0, "the next run does not count the streams of this one"


def test_a_stream_that_comes_later_has_an_arena_too(cuda: Fake) -> None:
    """Beside an arena of 12 KiB, in a budget that has no room for two of them."""
    steps = Steps(cuda)
    for i in range(14):
        steps.windows.begins(steps.key, 19 * 1024)
        cuda.delete(cuda.allocate(12 * 1024))
        if i > 5:
            cuda.on(0, SIDE)
            cuda.delete(cuda.allocate(6144))
            cuda.on(0, 0)
    assert cuda.pool(0).counts().served == cuda.pool(SIDE).counts().served == 1, steps.said
    assert cuda.live(0) == 18 * 1024
    assert steps.close().deviating == 0


def test_a_step_that_differs_falls_through_and_is_said(cuda: Fake) -> None:
    steps = Steps(cuda)
    for i in range(14):
        steps.step(scale=2 if i == 10 else 1)
    status = steps.close()
    assert status.deviating == 1 and status.total.fallen == 2 and status.last.fallen == 0
    assert sum("went to the ordinary allocator" in line for line in steps.said) == 1
    assert status.reserved_nbytes <= BUDGET


def test_an_arena_above_the_budget_is_refused(cuda: Fake) -> None:
    """Other memory of the device counts: with it, the budget has no room for the arena."""
    other = cuda.allocate(BUDGET - 4000)
    steps = Steps(cuda)
    for _ in range(8):
        steps.step()
    assert cuda.pool(0).arenas_nbytes() == (0, 0)
    status = steps.close()
    assert status.reason is not None and "above the budget" in status.reason and "budget=" in status.reason
    cuda.delete(other)


def test_what_falls_through_above_the_budget_ends_the_pool(cuda: Fake) -> None:
    steps = Steps(cuda)
    for _ in range(8):
        steps.step()
    steps.step(scale=400)
    steps.step()
    status = steps.close()
    assert status.reason is not None and "what fell through" in status.reason
    assert status.reserved_nbytes > BUDGET


def session_on(cuda: Fake, monkeypatch: pytest.MonkeyPatch, allocator: Callable[..., object]) -> tuple[PoolStatus, list[str]]:
    """A session of a model on the CPU, which believes that the model is on CUDA; its forwards make requests there."""

    class Current:
        device, cuda_stream = torch.device("cuda", 0), 0

    monkeypatch.setattr(native, "cuda_allocator", allocator)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Current)
    said: list[str] = []

    def requests(module: nn.Module, *_: object) -> None:
        if module.training:
            first, second = cuda.allocate(1000), cuda.allocate(3000)
            cuda.delete(first)
            cuda.delete(second)

    with training(True) as (run, model, optimizer):
        run.session.pool._device = torch.device("cuda:0")
        run.session.pool._say = said.append
        hook = model.register_forward_hook(requests)
        for i in range(12):
            plain_step(model, optimizer, i)
        hook.remove()
        status = run.status().pool
        assert status is not None
        pool_text(status)
    gc.collect()
    return status, said


def test_a_session_on_cuda_has_the_pool_of_its_device(cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = session_on(cuda, monkeypatch, lambda device, say: cuda.allocator)
    assert status.reason is None and status.deviating == 0 and status.last.served >= 2 and status.steps >= 4
    assert any("planned pool in force" in line for line in said)
    assert status.addresses is not None and status.addresses.arena_nbytes == 1024 + 3072, "in multiples of 512 bytes"


def test_where_it_cannot_be_built_one_line_says_so(cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise BuildError("CUDA's headers are not installed")

    status, said = session_on(cuda, monkeypatch, refused)
    assert status.reason == "the model is on cuda:0, and CUDA's headers are not installed" and len(said) == 1


def test_a_torch_without_cuda_says_so() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(BuildError, match="built without CUDA"):
        native.build.cuda_library(print)
