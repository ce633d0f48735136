"""Updates in backward take the options of that time: what is set between backward and `optimizer.step()` is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memopt import optimize
from lightning_memopt.errors import UpdatesInBackwardError
from tests.cpu.lib.early import OPTIMIZERS, counted
from tests.cpu.lib.fits import assert_same_tree
from tests.cpu.lib.models import Body, data, made, squares

Between = Callable[[torch.optim.Optimizer, int], None]


def loop(between: Between, mode: str | None, steps: int = 5) -> list[object]:
    """A loop that does something between backward and step. `mode`: as of `optimizer_in_backward`, None for the plain loop."""
    model = made(Body)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options: dict[str, Any] = {"budget": "min", "optimizer_in_backward": mode, "profile_steps": 1, "verbose": False}
    with contextlib.nullcontext() if mode is None else optimize(model, optimizer, **options) as run:
        for i in range(steps):
            loss = squares(model, data(64, 16, seed=i))
            with contextlib.nullcontext() if run is None else run.last_backward():
                loss.backward()
            between(optimizer, i)
            optimizer.step()
            optimizer.zero_grad()
    return [model.state_dict(), optimizer.state_dict()]


def warming(optimizer: torch.optim.Optimizer, i: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (i + 1)


def test_a_learning_rate_is_set_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXACT: seen in the first step, so nothing is updated in backward."""
    updates = counted(monkeypatch)
    assert_same_tree(loop(warming, None), loop(warming, "auto"))
    assert not updates
    with pytest.raises(UpdatesInBackwardError, match="between backward and"):
        loop(warming, "always")
    assert not updates


def decaying(optimizer: torch.optim.Optimizer, i: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 if i < 4 else 1e-3


def decaying_tensor(optimizer: torch.optim.Optimizer, i: int) -> None:
    if i == 4:
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)


@pytest.mark.parametrize("between", [decaying, decaying_tensor])
def test_what_was_not_so_in_the_first_step(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before are as ever; the one that is wrong by then raises."""
    updates = counted(monkeypatch)
    assert_same_tree(loop(between, None, steps=4), loop(between, "auto", steps=4))
    assert updates
    with pytest.raises(UpdatesInBackwardError, match="cannot be put right"):
        loop(between, "auto")


@pytest.mark.filterwarnings("ignore:MemOpt. there is no plan yet")  # each step counts as two
def test_a_step_that_torch_has_wrapped_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXACT: as where two threads make the first optimizers of a class at the same time. No update calls step hooks."""
    updates = counted(monkeypatch)
    OPTIMIZERS["adamw"]([torch.zeros(1)])  # torch wraps the step
    step = torch.optim.Optimizer.profile_hook_step(torch.optim.AdamW.step)
    step.hooked = True  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    steps: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(len(updates)))
    ends = [loop(lambda *_: None, mode) for mode in (None, "always")]
    hook.remove()
    assert_same_tree(*ends)
    assert steps == [0] * 12 + [n for n in (6, 12, 18, 24) for _ in range(2)]


def test_a_step_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, also where the replacement looks as what it calls."""
    original = torch.optim.AdamW.step

    @functools.wraps(original)
    def replaced(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(torch.optim.AdamW, "step", replaced)
    with pytest.raises(UpdatesInBackwardError, match="the step of AdamW was replaced"):
        loop(lambda *_: None, "always")
