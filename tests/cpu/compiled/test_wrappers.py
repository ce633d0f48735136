"""What `torch.compile(module)` returns: its calls are calls of the module, also of a module of torch.nn itself."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.record import instead_of_calls
from lightning_memopt.torch_private import INDUCTOR, inductor_compiles
from tests.cpu.compiled.training import Forward, keeping_all, train


def bare() -> nn.Module:
    """No module in it is of a class outside of torch.nn."""
    parts = ((nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    return nn.Sequential(*itertools.chain.from_iterable(parts))


def made() -> tuple[nn.Module, Forward]:
    model = bare()
    compiled = torch.compile(model, backend="aot_eager")
    return model, lambda x: compiled(x).square().mean()


def made_before() -> tuple[nn.Module, Forward]:
    """The compiled model has run before the run begins: it was split when nobody listened."""
    model, call = made()
    call(torch.randn(512, 48)).backward()
    model.zero_grad()
    return model, call


def test_a_compiled_module_of_torch_keeps_a_budget_with_the_bits_of_keeping_all() -> None:
    keeps, smallest = keeping_all(made), train(made, "min")
    budget = (smallest.nbytes + keeps.nbytes) // 2
    within = train(made_before, budget)
    assert smallest.nbytes < within.nbytes <= budget < keeps.nbytes
    assert smallest.has_bits_of(keeps)
    assert within.has_bits_of(keeps)
    for trained in (smallest, within):
        assert "1 of 1 compiled regions run ops again" in trained.text
        assert abs(trained.predicted_nbytes - trained.nbytes) <= 0.01 * trained.nbytes


class Own(nn.Linear):
    """Of a class outside of torch.nn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), Own(4, 4)])
def test_a_call_of_the_wrapper_is_a_call_of_the_module_within_only(module: nn.Module) -> None:
    torch._dynamo.reset()
    calls: list[int] = []
    compiled: Any = torch.compile(module, backend="eager")
    x = torch.ones(2, 4)

    def call(original: Any, *args: Any) -> Any:
        calls.append(1)
        return original(*args)

    plain = module(x)
    with instead_of_calls(module, call):
        assert torch.equal(compiled(x), plain)
        assert calls
        calls.clear()
        other: Any = torch.compile(Own(4, 4), backend="eager")
        other(x)
        assert not calls
        assert torch.equal(module(x), plain)
        assert calls == [1]
        calls.clear()
    compiled(x)
    module(x)
    assert not calls
    for cls in (type(module), type(compiled)):
        assert all("_compiled_call_impl" not in vars(c) for c in cls.__mro__ if c is not nn.Module)


def test_a_wrapper_itself_may_be_the_model_of_a_run() -> None:
    """Of a module without a length: the wrapper's `len` raises, so its truth must not be asked for."""

    def wrapped() -> tuple[nn.Module, Forward]:
        model: Any = torch.compile(Own(48, 48))
        return model, lambda x: model(x).square().mean()

    assert train(wrapped, "min", steps=7).status.phase == "planned"


def test_a_watched_wrapper_is_compiled_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = bare()
    compiled: Any = torch.compile(module, backend="eager")
    for _ in range(3):
        with instead_of_calls(module, lambda original, *args: original(*args)):
            compiled(torch.ones(2, 48))
        compiled(torch.ones(2, 48))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_that_something_will_be_compiled_is_known_before_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `fullgraph=True` only the first call imports it. Nobody listened to that call, so its region was never planned."""
    torch._dynamo.reset()
    monkeypatch.delitem(sys.modules, INDUCTOR, raising=False)
    assert not inductor_compiles()
    torch._dynamo.disable(nn.Linear(2, 2))  # as each optimizer does with its steps
    assert not inductor_compiles()
    torch.compile(nn.Linear(2, 2), fullgraph=True)
    assert inductor_compiles()
