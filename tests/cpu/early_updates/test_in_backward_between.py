"""Updates in backward, where weights or the optimizer's state are read or written before the step: refused, or left to it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt import optimize
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.early import OPTIMIZERS, WIDE, plain, same_as_plain
from tests.cpu.lib.loops import leaves_nothing
from tests.cpu.lib.models import Body, made, squares

Touch = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], Any]


def _saves(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], io.BytesIO())


def _clamps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


def _clamps_data(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)  # counts no version


def _swaps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    for p in model.parameters():
        p.data = torch.zeros(p.shape)  # no op


def _averages(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    seen[:] = seen or [AveragedModel(made(Body))]
    seen[0].update_parameters(model)


def _calls_a_part(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    with torch.no_grad():
        seen.append(model.layers[1](torch.ones(2, 16)))  # type: ignore[index, operator]


def _reads_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    seen.extend(p.detach().numpy().sum() for p in model.parameters())


OF_WEIGHTS: dict[str, Touch] = {
    "saves": _saves,
    "clamps": _clamps,
    "clamps data": _clamps_data,
    "swaps": _swaps,
    "averages": _averages,
    "calls a part": _calls_a_part,
    "reads numpy": _reads_numpy,
}
OF_STATE: dict[str, Touch] = {
    "saves the state": lambda model, optimizer, seen: seen.append(copy.deepcopy(optimizer.state_dict())),
    "clears": lambda model, optimizer, seen: optimizer.state.clear(),
    "replaces": lambda model, optimizer, seen: [s.update(exp_avg=s["exp_avg"] * 0) for s in optimizer.state.values()],
    "replaces by the same": lambda model, optimizer, seen: [s.update(step=torch.zeros(())) for s in optimizer.state.values()],
    "scales": lambda model, optimizer, seen: [s["exp_avg"].mul_(0.5) for s in optimizer.state.values()],
    "reads": lambda model, optimizer, seen: seen.extend(s["exp_avg"].sum() for s in optimizer.state.values()),
}
WORDS = "weights or the optimizer's state are read or written between backward"


def touching(touch: Touch, first: int) -> Callable[..., None]:
    """A loop that touches weights or state before the step, from step `first` on."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        seen: list[Any] = []
        for i, batch in enumerate(batches):
            loss = squares(model, batch)
            with run.last_backward() if run is not None else contextlib.nullcontext():
                loss.backward()
            if i >= first:
                touch(model, optimizer, seen)
            optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("touch", OF_WEIGHTS)
def test_weights_that_are_touched_from_the_first_step_on(touch: str, updates: list[Tensor]) -> None:
    """EXACT with "auto", which then leaves those weights to the step."""
    same_as_plain(Body, OPTIMIZERS["adam"], WIDE, touching(OF_WEIGHTS[touch], 0), mode="auto")
    assert len({id(p) for p in updates}) == (4 if touch == "calls a part" else 0)


@pytest.mark.parametrize("touch", OF_WEIGHTS | OF_STATE)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_weights_and_state_that_are_touched_from_a_later_step_on(mode: str, touch: str) -> None:
    """REFUSE: who reads would see them after the step, and what is written would come after it."""
    model = made(Body)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward=mode, profile_steps=1, verbose=False)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        with pytest.raises(UpdatesInBackwardError, match=f"6 parameters were updated in backward already, but {WORDS}"):
            touching((OF_WEIGHTS | OF_STATE)[touch], 3)(model, run, optimizer, WIDE)
        optimizer.zero_grad()
        plain(model, run, optimizer, WIDE[:1])  # the run can go on


def test_what_does_not_touch_them(updates: list[Tensor]) -> None:
    """EXACT: other tensors, options of parameters, and users' modes that begin and end between backward and step."""
    other = nn.Linear(2, 2)

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        for batch in batches:
            loss = squares(model, batch)
            before = FlopCounterMode(display=False).__enter__()
            with run.last_backward() if run is not None else contextlib.nullcontext():
                loss.backward()
            inside = FlopCounterMode(display=False).__enter__()
            other(torch.ones(2)).sum().backward()
            torch._foreach_mul_([p.detach() for p in other.parameters()], 0.5)
            assert sum(p.numel() for p in model.parameters() if p.requires_grad and p.device.type == "cpu")
            inside.__exit__(None, None, None)
            before.__exit__(None, None, None)
            optimizer.step()
            optimizer.zero_grad()

    same_as_plain(Body, OPTIMIZERS["adam"], WIDE, loop)
    assert len(updates) == 4 * 6


def test_a_forward_before_the_step() -> None:
    """REFUSE: a forward of training, too, would see weights that are updated already."""
    loop = touching(lambda model, *_: model(WIDE[0]), 3)
    with pytest.raises(UpdatesInBackwardError, match="the model is called again before optimizer.step"):
        same_as_plain(Body, OPTIMIZERS["adam"], WIDE, loop, mode="auto")


def test_a_second_marked_backward_in_the_first_step(updates: list[Tensor]) -> None:
    """Nobody but us reads weights between the two: the reason is the second backward."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        for batch in batches:
            out = model(batch)
            for loss in (out.square().sum(), out.sum()):
                with run.last_backward() if run is not None else contextlib.nullcontext():
                    loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop, mode="auto")
    assert not updates
    with pytest.raises(UpdatesInBackwardError, match="reads gradients or weights between"):
        same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop)
