"""Copies to the host that are under way when they return (`non_blocking=True`): user code waits, and a rebuild must, too."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memopt.record import unwatched
from lightning_memopt.record.rules import blocking
from tests.cpu.lib.harness import assert_exact, outcome
from tests.cpu.lib.models import Calls, X, made, verified

ATEN = torch.ops.aten


class Late:
    """`_to_copy` with non_blocking: the bytes are there when somebody has waited."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Tensor, bytes]] = []
        self.calls = 0

    def __call__(self, x: Tensor, *, non_blocking: bool = False, **_: Any) -> Tensor:
        y = x.clone()
        self.calls += 1
        if non_blocking:
            with unwatched():
                self.under_way.append((y, ctypes.string_at(y.data_ptr(), y.nbytes)))
            y.fill_(torch.nan)
        return y

    def wait(self) -> None:
        while self.under_way:
            y, arrived = self.under_way.pop()
            with unwatched():
                ctypes.memmove(y.data_ptr(), arrived, len(arrived))


@pytest.fixture
def late() -> Iterator[Late]:
    library, copies = torch.library.Library("aten", "IMPL"), Late()
    library.impl("_to_copy", copies, "CPU")
    yield copies
    library._destroy()


def test_a15_a_rebuilt_copy_to_the_host_is_waited_for(late: Late) -> None:
    def call(x: Tensor, layer: Any) -> Tensor:
        on_host = layer(x).to("cpu", non_blocking=True, copy=True)
        late.wait()
        return on_host.sin().exp()

    def model() -> Any:
        return made(lambda: Calls(call, torch.nn.Linear(16, 16)))

    found = []
    for drop in (False, True):
        late.calls = 0
        found.append(outcome(model(), lambda m: m(X).sum(), drop=drop))
        assert (late.calls > 1) is drop, "it ran again for what was dropped"
        assert not late.under_way
    assert_exact(*found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verified(model(), lambda m: m(X).sum()).opaque_ops


def test_only_non_blocking_is_changed() -> None:
    for func in (ATEN.copy_.default, ATEN.copy.default):
        assert blocking(func, (1, 2, True), {}) == ((1, 2, False), {})
        assert blocking(func, (1, 2), {}) == ((1, 2), {})
    assert blocking(ATEN._to_copy.default, (1,), {"device": "cpu", "non_blocking": True}) == (
        (1,),
        {"device": "cpu", "non_blocking": False},
    )
    assert blocking(ATEN.add.Tensor, (1, 2, True), {}) == ((1, 2, True), {})
