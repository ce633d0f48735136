"""Which ops may run again on a device, where the bits of a second run depend on more than on the inputs (R1)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.device import determinism
from lightning_memopt.logs import silent
from lightning_memopt.plan import Machine
from lightning_memopt.record import recorder, rules
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.solving import plan_for, tell
from tests.cpu.lib.device_thread import backward_in_its_own_thread
from tests.cpu.lib.loops import QUIET, assert_same, sgd, state
from tests.cpu.lib.observed_graph import graph_of

ATEN = torch.ops.aten
CONVOLUTION = ATEN.convolution.default

ORDERED_IF_ASKED = (
    ATEN.index_add.default,
    ATEN.index_copy.default,
    ATEN.index_copy_.default,
    ATEN.index_put.default,
    ATEN._unsafe_index_put.default,
    ATEN._unsafe_masked_index_put_accumulate.default,
    ATEN.scatter.src,
    ATEN.scatter_.src,
    ATEN.scatter.reduce,
    ATEN.scatter_add.default,
    ATEN.scatter_reduce.two,
    ATEN.put.default,
    ATEN.index_reduce.default,
    ATEN.max_unpool2d.default,
    ATEN.max_unpool3d.default,
    ATEN.nll_loss2d_forward.default,
)
"""Of torch's list of what is not deterministic on CUDA (`torch.use_deterministic_algorithms`): all ops of a forward."""
NEVER_ORDERED = (ATEN.cumsum.default, ATEN.cumprod.default, ATEN.logcumsumexp.default, ATEN._logcumsumexp.default)
ANYWHERE = (ATEN.gather.default, ATEN.index_select.default, ATEN.addmm.default, ATEN.cummax.default)


@contextlib.contextmanager
def deterministic(on: bool, warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("on", "warn_only"), [(False, False), (True, True), (True, False)])
def test_a8_what_runs_again_on_a_device(on: bool, warn_only: bool) -> None:
    """Where torch only warns, ops without a deterministic kernel run in any order."""
    with deterministic(on, warn_only):
        for op in (*ORDERED_IF_ASKED, *NEVER_ORDERED, *ANYWHERE):
            assert rules.may_run_again(op, "cpu"), op
            expected = op in ANYWHERE or (op in ORDERED_IF_ASKED and on and not warn_only)
            assert rules.may_run_again(op, "cuda") is expected, op


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(determinism, "_tuned", [])
    with torch.backends.cudnn.flags(benchmark=True):
        yield


def test_a14_a_choice_by_time_stays_when_the_setting_is_off_again(tunes: None) -> None:
    in_force = rules.rules_in_force()
    assert not rules.may_run_again(CONVOLUTION, "cuda") and rules.may_run_again(CONVOLUTION, "cpu")
    with torch.backends.cudnn.flags(benchmark=False):
        assert not rules.may_run_again(CONVOLUTION, "cuda"), "the thread of the forward remembers its choice"
    assert rules.rules_in_force() == in_force
    for op in (ATEN.cudnn_convolution.default, ATEN._convolution.default):
        assert not rules.may_run_again(op, "cuda"), "it has an argument of its own"


def test_a14_without_choices_by_time_convolutions_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_tuned", [])
    assert rules.may_run_again(CONVOLUTION, "cuda")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x


def test_a14_what_is_kept_is_said(tunes: None) -> None:
    model, x = Blocks(), torch.randn(8, 4, 16, 16)
    graph = graph_of(model, (x,), lambda: model(x).square().mean())
    offloading = Offloading(torch.device("cpu"), MemOptConfig(verbose=False))
    for device, lines in (("cuda", 1), ("cpu", 0)):
        said: list[str] = []
        tell(plan_for(replace(graph, device=device), None, offloading, silent, Machine()), None, offloading, said.append)
        of_convolutions = [line for line in said if "160.00 KiB of results of convolutions" in line]
        assert len(of_convolutions) == lines, "five results of 32 KiB"


class Tuned:
    """Convolutions with two algorithms, of which each thread chooses by a key of its own, as cuDNN does."""

    def __init__(self) -> None:
        self.known = threading.local()
        self.forward = threading.get_ident()
        self.observed: Any = None
        self.differing = 0

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """What the thread of backward chose for the first key is what the forward chose; then its times were others."""
        y: Tensor = ATEN._convolution.default(x, *args, False, False, True, True)
        self.observed = self.observed or x.shape
        if threading.get_ident() == self.forward or x.shape == self.observed:
            return y
        self.differing += 1
        return y.nextafter(torch.full_like(y, torch.inf))


def _trained(tuned: Tuned, budget: str | None) -> dict[str, Tensor]:
    """The state after five steps, the last two of another size."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = sgd(model)
    tuned.forward, tuned.observed = threading.get_ident(), None
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, budget=budget, **QUIET):
        for size in (8, 8, 8, 6, 6):
            model(torch.randn(size, 4, 16, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def test_a14_convolutions_that_cudnn_chooses_by_time_are_kept(tunes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward runs in the device's thread, and a smaller batch has a key of its own, which no observed step has verified."""
    asked = recorder.may_run_again
    monkeypatch.setattr(recorder, "may_run_again", lambda func, device: asked(func, "cuda"))
    library, tuned = torch.library.Library("aten", "IMPL"), Tuned()
    library.impl("convolution", tuned, "CPU")
    try:
        with backward_in_its_own_thread():
            plain = _trained(tuned, None)
            planned = _trained(tuned, "min")
            assert tuned.differing == 0, "no convolution ran again"
            assert_same(plain, planned)
    finally:
        library._destroy()
