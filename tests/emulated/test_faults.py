"""State, gradients and frozen weights in the host's memory: copies that are interrupted, memory that cannot be locked."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.runtime import parked_gradients, parked_weights
from lightning_memopt.runtime.tiers import room, streams
from lightning_memopt.runtime.tiers.shelf import AWAY
from tests.cpu.lib.said import listening
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

WIDTH, STEPS, FROM = 2048, 7, 5
COPIES = (streams, "copy"), (parked_gradients, "copy"), (parked_weights, "copy")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.trained(self.frozen(x)))


class Interrupted:
    """The n-th copy is interrupted before it is queued, or after that."""

    def __init__(self, n: int, after: bool) -> None:
        self.n, self.after, self.count, self.armed = n, after, 0, False

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.count += self.armed
            interrupts = self.armed and self.count == self.n
            if interrupts and not self.after:
                raise KeyboardInterrupt
            result = original(*args)
            if interrupts:
                raise KeyboardInterrupt
            return result

        return called


def train(budget: Any, interrupted: Interrupted | None = None) -> tuple[list[Tensor], str, Any]:
    """Weights and state, lines and the plan of a loop that begins again from its checkpoint after an interrupt."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).cuda()
    optimizer = optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, fused=True)
    options = dict(offload="host", max_slowdown=1e6, optimizer_in_backward="never")
    plan = None
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(listening())
        run = None if budget is None else stack.enter_context(optimize(model, optimizer, budget=budget, **options))
        step, kept = 0, copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        while step < STEPS:
            if step == FROM:
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            try:
                if interrupted is not None:
                    interrupted.armed = step >= FROM
                torch.manual_seed(step)
                optimizer.zero_grad()
                model(torch.randn(16, WIDTH, device="cuda")).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                step += 1
            except KeyboardInterrupt:
                assert interrupted is not None
                interrupted.armed = False
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                step = FROM
            finally:
                if interrupted is not None:
                    interrupted.armed = False
        plan = None if run is None else run.status().plan
        text = said.getvalue()
    assert not AWAY and not room.taken_nbytes("host")
    state = [t for each in optimizer.state.values() for t in each.values()]
    return [t.detach().cpu() for t in (*model.parameters(), *state)], text, plan


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_a_copy_loses_nothing(after: bool) -> None:
    plain, _, _ = train(None)
    count = Interrupted(0, after)
    before = device.races()
    for n in (0, *range(1, 120, 20)):
        interrupted = Interrupted(n, after) if n else count
        if n > count.count:
            continue
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in COPIES:
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
            found, _, plan = train("min", interrupted)
        assert equal(found, plain), n
        if not n:
            assert {state.what for state in plan.states} == {"state", "gradient"} and plan.weights and count.count > 20
    assert device.races() == before


def test_memory_that_cannot_be_page_locked() -> None:
    """Gradients and frozen weights stay on the device, and lines say what to do."""
    plain, _, _ = train(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_lock", lambda *_: False)
        found, text, _ = train("min")
    assert equal(found, plain)
    assert "gradients that the plan parks stay on the device" in text and "raise `ulimit -l`" in text
    assert "frozen weights that the plan parks stay on the device" in text
