"""Exceptions and interrupts anywhere in a step: the run goes on exactly, or leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from tests.cpu.lib.loops import (
    QUIET,
    agrees,
    batches,
    installed,
    leaves_nothing,
    loss_of,
    sgd,
    small,
    step,
)


class Boom(Exception):
    pass


class Fault(nn.Module):
    """Raises where it is armed, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = small()
        self.armed: tuple[str, type[BaseException]] | None = None

    def fire(self, where: str, *_: Any) -> None:
        if self.armed is not None and self.armed[0] == where:
            raised, self.armed = self.armed[1], None
            raise raised(where)

    def forward(self, x: Tensor) -> Tensor:
        self.fire("forward, at its begin")
        h = self.inner.embed(x)
        h.register_hook(lambda g: self.fire("backward"))
        h = torch.nn.functional.gelu(self.inner.layers[0](h))
        self.fire("forward")
        for layer in self.inner.layers[1:]:
            h = torch.nn.functional.gelu(layer(h))
        return self.inner.head(self.inner.dropout(h))


WHERE = ("forward, at its begin", "forward", "between", "backward", "update")


@pytest.mark.parametrize("raised", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_exceptions_then_retry(where: str, raised: type[BaseException]) -> None:
    """After an exception at any point of an observed or of a planned step, going on gives the bits of the plain run."""
    data = batches(6)

    def run_all(model: Fault, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: model.fire("update"))
        torch.manual_seed(5)
        for i, batch in enumerate(data):
            if i in (1, 4):  # the second observed step, the second planned one
                model.armed = where, raised
                with pytest.raises(raised):
                    loss = loss_of(model, batch)
                    model.fire("between")
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            step(model, optimizer, batch)

    run = agrees(run_all, Fault)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


@pytest.mark.parametrize("after", [0, 4], ids=["observing", "planned"])
@pytest.mark.parametrize("where", WHERE)
def test_interrupt_leaves_nothing(where: str, after: int) -> None:
    """An interrupt that ends the block leaves torch, the model and the optimizer as they were."""
    model = Fault()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: model.fire("update"))
    with leaves_nothing(model), pytest.raises(KeyboardInterrupt), optimize(model, optimizer, budget="min", **QUIET):
        for batch in batches(after):
            step(model, optimizer, batch)
        model.armed = where, KeyboardInterrupt
        loss = loss_of(model, batches(1)[0])
        model.fire("between")
        loss.backward()
        optimizer.step()
    step(model, optimizer, batches(1)[0])


@pytest.mark.parametrize("after", [0, 4], ids=["observing", "planned"])
def test_nothing_is_on_after_a_failed_forward(after: int) -> None:
    """As soon as an interrupted forward was left, no hooks of ours are on, although the block goes on."""
    model = Fault()
    optimizer = sgd(model)
    before = installed()
    with optimize(model, optimizer, budget="min", **QUIET):
        for batch in batches(after):
            step(model, optimizer, batch)
        model.armed = "forward", KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            model(batches(1)[0][0])
        now = installed()
        assert now[0] is None and now[1] == before[1] == []
    assert installed() == before, "what is on torch during a run does nothing between forwards, and goes with it"
