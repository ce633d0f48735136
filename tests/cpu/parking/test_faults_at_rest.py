"""What goes wrong while state, gradients and frozen weights are parked: at any copy, out or back. Nothing is lost: the loop
goes on from its last checkpoint, in the same run, and ends with the bits of the plain run. Nothing is left in the tier.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memopt import optimize
from lightning_memopt.errors import OffloadError, TierFullError
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import install_native, parked_gradients, state_copies, weight_memory
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import room
from lightning_memopt.runtime.tiers.disk import _DiskParked
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.runtime.tiers.shelf import AWAY, Shelf
from lightning_memopt.runtime.weight_memory import WeightMemory
from tests.cpu.lib.engines import elements
from tests.cpu.lib.forked import forked
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_gradients import NEVER

STEPS, FROM = 6, 4
"""Faults come from this step on: the plan is in force, and the checkpoint is of before it."""
Door = tuple[Any, str]
COPIES: tuple[Door, ...] = (
    (Depot, "store"),
    (_DiskParked, "wait_stored"),
    (_DiskParked, "fetch"),
    (_DiskParked, "wait_fetched"),
    (state_copies, "bytes_of"),
    (state_copies, "empty_storage"),
    (Shelf, "put"),
    (parked_gradients, "storage_on"),
    (parked_gradients, "copy"),
    (weight_memory, "copy"),
    (WeightMemory, "drop"),
)
"""All that moves bytes, in the thread of the loop. An interrupt comes in this thread."""
WRITES, READS = ((Scratch, "write"),), ((Scratch, "read"),)
FULL, FAILS = (partial(OSError, number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO))


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: gradients and frozen weights are not parked, and a line says so")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.trained = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trained(self.frozen(x)))


def made(device: str = "cpu", width: int = 64) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(3))).to(device)
    fused = device == "cuda" or None
    return model, optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, fused=fused)


def bits_of(model: nn.Module, optimizer: optim.Optimizer) -> list[bytes]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return elements(t.detach().cpu() for t in (*model.parameters(), *states))


class Faults:
    """Calls of these functions raise an error: the n-th one, or all from it on. The others are counted. Without an error, the
    process is killed.

    after: the n-th call has done its work before that.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        doors: tuple[Door, ...],
        error: Callable[[], BaseException] | None,
        n: int = 0,
        on: bool = False,
        after: bool = False,
    ) -> None:
        self.count, self.armed = 0, False
        self._error = error
        self._n = n
        self._on = on
        self._after = after
        for owner, name in doors:
            patch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count += self.armed
            fails = self.armed and self._n > 0 and (self.count == self._n or (self._on and self.count > self._n))
            if not fails:
                return original(*args, **kwargs)
            if self._after:
                original(*args, **kwargs)
            if self._error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise self._error()

        return called


class Trained:
    """The bits that a run leaves. `again`: how often the loop began again from its checkpoint."""

    def __init__(self, faults: Faults | None = None, device: str = "cpu", width: int = 64, **options: Any) -> None:
        gc.collect()
        model, optimizer = made(device, width)
        self.again = 0
        with listening() as said, optimize(model, optimizer, **options) if options else contextlib.nullcontext() as run:
            self._train(model, optimizer, faults)
            if run is not None:
                plan = run.status().plan
                if plan is not None:  # after a copy that failed, steps may be observed again
                    self.parked = {state.what for state in plan.states} | {"weight" for _ in plan.weights}
        self.said = said.taken()
        assert not AWAY and not room.taken_nbytes("disk") and not room.taken_nbytes("host")
        self.bits = bits_of(model, optimizer)

    def _train(self, model: nn.Module, optimizer: optim.Optimizer, faults: Faults | None) -> None:
        step, kept = 0, ({}, {})
        while step < STEPS:
            if step == FROM:
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            try:
                if faults is not None:
                    faults.armed = step >= FROM
                one_step(model, optimizer, step)
                step += 1
            except (OffloadError, KeyboardInterrupt):
                self.again += 1
                assert self.again < 3, "it fails for ever"
                assert faults is not None
                faults.armed = False
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                step = FROM
            finally:
                if faults is not None:
                    faults.armed = False


def one_step(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    weight = next(model.parameters())
    model(torch.randn(16, len(weight), device=weight.device)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


MIN: dict[str, Any] = NEVER | {"budget": "min"}


def left() -> tuple[int, int, int]:
    """Descriptors, mapped files that have no name, threads."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    maps = Path("/proc/self/maps")
    return descriptors, maps.read_bytes().count(b"(deleted)") if maps.exists() else 0, threading.active_count()


KINDS: dict[str, dict[str, Any]] = {
    "interrupt": {"doors": COPIES, "error": KeyboardInterrupt},
    "interrupt after": {"doors": COPIES, "error": KeyboardInterrupt, "after": True},
    "full disk, once": {"doors": WRITES, "error": FULL},
    "full disk": {"doors": WRITES, "error": FULL, "on": True},
    "read": {"doors": READS, "error": FAILS},
}


def copies(doors: tuple[Door, ...]) -> int:
    """How many there are in the steps in which they fail."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, doors, FULL)
        trained = Trained(faults, **MIN)
    assert trained.parked == {"state", "gradient", "weight"} and faults.count >= 12
    return faults.count


def check(kind: str, which: Callable[[int], range]) -> None:
    """Let each of these copies of a run fail."""
    plain, before = Trained().bits, None
    for n in which(copies(KINDS[kind]["doors"])):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, n=n, **KINDS[kind])
            trained = Trained(faults, **MIN)
        assert trained.bits == plain, n
        assert before in (None, left()), n
        before = before or left()
        if kind.startswith("full disk"):  # what cannot be written stays on the device
            assert trained.again == 0 and "No space left on device" in trained.said and "another directory" in trained.said, n
        else:
            assert trained.again == 1, n


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_fails(kind: str) -> None:
    """One in a dozen of them."""
    check(kind, lambda count: range(1, count + 1, count // 12 + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_each_copy_fails_in_turn(kind: str) -> None:
    check(kind, lambda count: range(1, count + 1))


def test_an_error_names_what_cannot_be_read_and_what_to_do() -> None:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, READS, FAILS, 1)
        model, optimizer = made()
        with optimize(model, optimizer, **MIN):
            for step in range(FROM):
                one_step(model, optimizer, step)
            faults.armed = True
            with pytest.raises(OffloadError, match="optimizer state 'exp_avg.*: copying .* bytes from the disk tier failed"):
                one_step(model, optimizer, FROM)
            faults.armed = False


@pytest.mark.parametrize("pages", [4, 12, 24, 48])
def test_a_tier_that_is_smaller_than_what_rests(pages: int) -> None:
    """No more than its budget is there, whatever copies it takes, and bits are the plain ones."""
    limit, most = 4096 * pages, [0]
    with pytest.MonkeyPatch.context() as patch:
        give = room.Room.__init__

        def watched(self: Any, name: str, nbytes: int, limit_nbytes: int | None = None) -> None:
            give(self, name, nbytes, limit_nbytes)
            most[0] = max(most[0], room.taken_nbytes("disk"))

        patch.setattr(room.Room, "__init__", watched)
        trained = Trained(disk_budget=limit, **MIN)
    assert trained.bits == Trained().bits and 0 < most[0] <= limit
    assert "in the disk tier" in trained.said


@pytest.mark.parametrize("n", range(1, 5))
def test_a_tier_that_is_full_when_it_is_made(n: int) -> None:
    """Others have taken the room since the plan was made: what it parks stays on the device, and a line says what to do."""
    message = "the disk tier has 1.00 MiB of at most 1.00 MiB, and no room for more; set a larger disk_budget"
    with pytest.MonkeyPatch.context() as patch:
        counts = [0]
        give = room.Room.__init__

        def full(self: Any, *args: Any) -> None:
            counts[0] += 1
            if counts[0] >= n:
                self.give = lambda: None
                raise TierFullError(message)  # each has frames of its own, which hold tensors
            give(self, *args)

        patch.setattr(room.Room, "__init__", full)
        trained = Trained(**MIN)
    assert trained.bits == Trained().bits and "stay" in trained.said and "set a larger disk_budget" in trained.said


def until_killed(folder: Path, n: int, after: bool) -> None:
    """Train, with a checkpoint on disk after each step, until this copy kills the process."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, COPIES, None, n, after=after)
        model, optimizer = made()
        with optimize(model, optimizer, **MIN | {"offload": f"disk:{folder / 'tier'}"}):
            for step in range(STEPS):
                faults.armed = step >= FROM
                one_step(model, optimizer, step)
                faults.armed = False
                torch.save((step + 1, model.state_dict(), optimizer.state_dict()), folder / "kept.new")
                os.replace(folder / "kept.new", folder / "kept")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("n", [1, 9, 30, 60])
def test_a_process_that_is_killed_at_a_copy_is_resumed(n: int, after: bool, tmp_path: Path) -> None:
    """From its last checkpoint, by another run, with the bits of the plain run; the tier's directory is empty."""
    (tmp_path / "tier").mkdir()
    assert forked(until_killed, [(tmp_path, n, after)]) == [-signal.SIGKILL]
    assert not list((tmp_path / "tier").iterdir())
    begun, weights, state = torch.load(tmp_path / "kept")
    assert FROM <= begun < STEPS
    model, optimizer = made()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with optimize(model, optimizer, **MIN):
        for step in range(begun, STEPS):
            one_step(model, optimizer, step)
    assert bits_of(model, optimizer) == Trained().bits
