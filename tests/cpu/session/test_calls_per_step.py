"""What a step costs in Python: how many functions it calls beyond those of the plain step, and what it changes of torch."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import live_objects, optimize
from lightning_memopt.compiled import compiles
from lightning_memopt.native import engine, install
from lightning_memopt.record import around_calls, beneath_calls, drop_seams, keep_seams
from lightning_memopt.record.calls import CALL
from lightning_memopt.record.settings import SETTERS
from lightning_memopt.torch_private import INDUCTOR
from tests.cpu.lib.device_thread import in_both_threads
from tests.cpu.lib.engines import needs_native

PLACES = [
    *((torch.Tensor, name) for name in ("data_ptr", "numpy", "__array__", "__dlpack__")),
    *((torch.UntypedStorage, name) for name in ("__new__", "data_ptr", "__setitem__", "fill_", "copy_", "resize_")),
    *SETTERS,
    (torch._C._autograd, "_saved_tensors_hooks_disable"),
    (torch._C._autograd, "_push_saved_tensors_default_hooks"),
]
PLANNED, OBSERVED = 300, 20_000
"""Maximum number of calls of a step."""
LISTENING = 30
"""Number of further calls of a forward if the process has imported a compiler: they say how the compiler is to split code."""


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of the README."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    model = nn.Sequential(*blocks)
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the calls of Python functions in this block, by file. Resuming a generator counts as a call."""
    found: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    in_both_threads(lambda: sys.setprofile(seen))
    try:
        yield found
    finally:
        in_both_threads(lambda: sys.setprofile(None))


def calls_of(n: int, by: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Counter[str]:
    """The calls of the n-th step, beyond those of the plain step. `by`: opens the run."""
    gc.collect()
    with beneath_calls({}, print):  # lets go of the models that other tests left
        gc.collect()
    plain, run = made(), made()
    for _ in range(2):
        step(*plain)
    with counting() as expected:
        step(*plain)
    with by(*run):
        for _ in range(n):
            step(*run)
        with counting() as found:
            step(*run)
    found.subtract(expected)
    return found


def asks() -> int:
    return LISTENING if compiles() else 0


def calls_of_a_planned_step() -> Counter[str]:
    return calls_of(9, lambda *run: optimize(*run, budget="min", verbose=False, profile_steps=1))


@needs_native
def test_a_planned_step() -> None:
    found = calls_of_a_planned_step()
    assert found.total() <= PLANNED + asks(), found.most_common(20)


@needs_native
def test_a_planned_step_of_a_process_that_has_imported_a_compiler() -> None:
    importlib.import_module(INDUCTOR)
    found = calls_of_a_planned_step()
    assert compiles() and found.total() <= PLANNED + LISTENING, found.most_common(20)


def test_an_observed_step() -> None:
    gc.collect()  # what other tests have left is told of steps, too
    found = calls_of(2, lambda *run: optimize(*run, budget="1GiB", verbose=False, profile_steps=9))
    if engine.loaded() is not None:
        assert found.total() <= OBSERVED + asks(), found.most_common(20)
    assert not found[live_objects.__file__], "other threads would wait while all objects are looked at"


def attributes() -> list[Any]:
    return [(getattr(owner, name, None), name in vars(owner)) for owner, name in PLACES]


def test_torch_is_changed_once_a_run() -> None:
    before = attributes()
    model, optimizer = made()
    with optimize(model, optimizer, budget="min", verbose=False, profile_steps=1):
        for _ in range(2):
            step(model, optimizer)
        within = attributes()
        assert all(
            now != then
            for (owner, name), now, then in zip(PLACES, within, before, strict=True)
            if hasattr(owner, name) and engine.loaded()
        )
        for _ in range(5):
            step(model, optimizer)
            assert attributes() == within
    assert attributes() == before


def test_an_attribute_that_user_code_sets_meanwhile() -> None:
    """It is wrapped at the next forward, and is the user's when the run is over; so is an original that user code puts back."""
    original, model, optimizer = torch.Tensor.numpy, *made()

    def theirs(t: torch.Tensor) -> Any:
        return original(t)

    try:
        with optimize(model, optimizer, budget="min", verbose=False, profile_steps=1):
            step(model, optimizer)
            torch.Tensor.numpy = theirs  # type: ignore[method-assign, assignment]
            step(model, optimizer)
            assert torch.Tensor.numpy is not theirs
            torch.Tensor.numpy = original  # type: ignore[method-assign]
            step(model, optimizer)
            assert torch.Tensor.numpy is not original
        assert torch.Tensor.numpy is original
        with optimize(model, optimizer, budget="min", verbose=False, profile_steps=1):
            step(model, optimizer)
            torch.Tensor.numpy = theirs  # type: ignore[method-assign, assignment]
        assert torch.Tensor.numpy is theirs
    finally:
        torch.Tensor.numpy = original  # type: ignore[method-assign]


def test_only_what_a_run_changes_often_stays_until_its_end() -> None:
    """What was watched often before the run does not stay: each call of such a module would look for a listener."""
    run, module = nn.Identity(), nn.Linear(2, 2)

    def watch() -> bool:
        with around_calls([module], lambda _: None, lambda _: None):
            assert CALL in vars(nn.Linear)
        return CALL in vars(nn.Linear)

    assert not any(watch() for _ in range(100))
    keep_seams(run)
    try:
        assert not watch()
        assert any(watch() for _ in range(100)), "each change clears what Python has cached for the class"
    finally:
        drop_seams(run)
    assert CALL not in vars(nn.Linear)


def test_what_python_makes_during_a_run_is_counted() -> None:
    """Torch asks another allocator for the storages that Python makes: no step looks for them."""
    counter = install()
    if counter is None:
        pytest.skip("no compiler")
    model, optimizer = made()
    with optimize(model, optimizer, budget="min", verbose=False, profile_steps=1):
        original = torch.ones(1000)
        before = counter.live_nbytes
        held = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
        assert counter.live_nbytes - before == 2 * original.nbytes
        del held
        assert counter.live_nbytes == before
