"""Updates in backward, where gradients are looked at from some later step on: refused by name, or left, never other numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_memopt import optimize
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session.cache.solves import Solves
from lightning_memopt.session.observe.observing import Waiting
from tests.cpu.lib.early import OPTIMIZERS, WIDE, plain, same_as_plain
from tests.cpu.lib.loops import leaves_nothing
from tests.cpu.lib.models import Body, data, made, squares
from tests.cpu.lightning.test_lightning_copies import Task, loader, trainer_of

LATER = 3


Look = Callable[[nn.Module, torch.optim.Optimizer], Any]


def _unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def _clips(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


LOOKS: dict[str, Look] = {
    "clip by norm": lambda model, _: clip_grad_norm_(model.parameters(), 0.1),
    "clip by value": lambda model, _: clip_grad_value_(model.parameters(), 0.1),
    "total norm": lambda model, _: torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    "no op": lambda model, _: [p.grad is None for p in model.parameters()],
    "scaler": _unscale,
}


def looking(look: Look, first: int) -> Callable[..., None]:
    """A loop that looks at gradients before the step, from step `first` on."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        for i, batch in enumerate(batches):
            loss = squares(model, batch)
            with run.last_backward() if run is not None else contextlib.nullcontext():
                loss.backward()
            if i >= first:
                look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_gradients_that_are_read_from_a_later_step_on(mode: str, look: str, updates: list[Tensor]) -> None:
    """REFUSE, at the first reading: what clips would find no gradients, and clip nothing without a word."""
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward=mode, profile_steps=1, verbose=False)
    loop = looking(LOOKS[look], LATER)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        with pytest.raises(UpdatesInBackwardError, match=r"gradient .* is read .* 6 parameters were updated"):
            loop(model, run, optimizer, WIDE)
        assert len(updates) == 6 * LATER
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        plain(model, run, optimizer, WIDE[:1])  # the run can go on


def test_gradients_that_are_read_in_the_first_step_without_an_op_are_kept(updates: list[Tensor]) -> None:
    """EXACT: who counts gradients finds them in every step, and in those of one parameter only, they alone are kept."""
    every = looking(LOOKS["no op"], 0)
    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, every, mode="auto")
    assert not updates
    seen: list[bool] = []
    first = looking(lambda model, _: seen.append(next(model.parameters()).grad is None), 0)
    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, first, mode="auto")
    assert updates and len({id(p) for p in updates}) == 5 and not any(seen)


def test_gradients_are_read_freely_outside_of_backward_and_step(updates: list[Tensor]) -> None:
    """EXACT: before backward, after the step, and of other models at any time."""
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        look = looking(lambda *_: clip_grad_norm_(other.parameters(), 0.1), 0)
        for batch in batches:
            clip_grad_norm_(model.parameters(), 0.1)
            look(model, run, optimizer, [batch])
            clip_grad_norm_(model.parameters(), 0.1)

    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop)
    assert len(updates) == 4 * 6


class Experts(Body):
    """Each forward uses another one of the last layers. Without a gradient, momentum does not move the others; by zeros, it
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.experts[self.calls % 3](super().forward(x))


def clearing(clear: Callable[[nn.Module, torch.optim.Optimizer], Any], first: int) -> Callable[..., None]:
    """A loop that clears gradients in this way from step `first` on."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        for i, batch in enumerate(batches):
            loss = squares(model, batch)
            with run.last_backward() if run is not None else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            clear(model, optimizer) if i >= first else optimizer.zero_grad()

    return loop


def _zeroes_experts(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for part in model.children():
        part.zero_grad(set_to_none=part is model.layers)


ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _: model.zero_grad(False),
    "a part": _zeroes_experts,
}
STEPS = [data(64, 16, seed=s) for s in range(14)]


@pytest.mark.parametrize("zero", ZERO)
def test_gradients_that_are_set_to_zero_from_a_later_step_on(zero: str, updates: list[Tensor]) -> None:
    """EXACT with "auto": zeros stand where plain training has them, and parameters are updated as usual. Refused with "always",
    before anything is updated."""
    zeroes = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    loop = clearing(ZERO[zero], 8)
    same_as_plain(Experts, OPTIMIZERS["sgd"], STEPS, loop, mode="auto")
    assert updates and (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == zeroes
    with pytest.raises(UpdatesInBackwardError, match="set to zero in place"):
        same_as_plain(Experts, OPTIMIZERS["sgd"], STEPS, loop)


def test_gradients_that_are_kept_from_a_later_step_on() -> None:
    """REFUSE: plain training would add to gradients that are gone."""
    with pytest.raises(UpdatesInBackwardError, match="zero_grad.. was not called since the last step, which freed 6"):
        same_as_plain(Body, OPTIMIZERS["sgd"], STEPS, clearing(lambda *_: None, 5), mode="auto")


def test_gradients_that_are_cleared_by_hand(updates: list[Tensor]) -> None:
    """EXACT: without `zero_grad` in any step."""

    def clears(model: nn.Module, _: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad = None

    same_as_plain(Experts, OPTIMIZERS["sgd"], STEPS, clearing(clears, 0))
    assert updates


def test_a_hook_that_comes_later(updates: list[Tensor]) -> None:
    """EXACT with "auto": a step pre-hook sees its gradients, in ordinary steps. Refused with "always", before anything is
    updated. Hooks of gradients run before updates."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        plain(model, run, optimizer, batches[:2])
        hook = optimizer.register_step_pre_hook(_clips)
        handle = next(model.parameters()).register_hook(lambda grad: grad * 0.5)
        plain(model, run, optimizer, batches[2:4])
        hook.remove()
        plain(model, run, optimizer, batches[4:])
        handle.remove()

    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop, mode="auto")
    assert len(updates) == 2 * 6
    with pytest.raises(UpdatesInBackwardError, match="pre-hook"):
        same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop, mode="always")


class Clips(pl.Callback):
    """Sets the Trainer's clipping in a later step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATER:
            trainer.gradient_clip_val = 0.001


def test_clipping_that_a_trainer_begins_later(updates: list[Tensor]) -> None:
    """EXACT: from then on parameters are updated as usual."""
    ends = []
    for mode in ("never", "auto"):
        torch.manual_seed(0)
        task = Task()
        trainer = trainer_of(Clips(), optimizer_in_backward=mode)
        trainer.fit(task, loader())
        ends.append(task.state_dict())
    assert all(torch.equal(ends[0][name], t) for name, t in ends[1].items())
    assert len(updates) == 6 * (LATER - 1)


def test_a_shape_that_waits_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger batch for which no plan is made now: its parameters are updated after backward, and nothing is refused."""
    monkeypatch.setattr(Solves, "allows", lambda self, signature, planned, alone: not planned)
    sizes = [8] * 5 + [24, 8, 24]
    run = same_as_plain(Body, OPTIMIZERS["sgd"], [data(size, 16, seed=s) for s, size in enumerate(sizes)])
    assert any(isinstance(state, Waiting) for state in run.session._plan_cache.values())


def restored(backwards: int, steps: bool) -> list[Tensor]:
    """A loop that is interrupted between backward and the optimizer's step, and goes on from a checkpoint. `backwards`: of the
    next step; the last one is marked. `steps`: it steps at once instead.
    """
    model = made(Body)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with optimize(model, optimizer, budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False) as run:
        plain(model, run, optimizer, [data(8, 16, seed=s) for s in range(4)])
        kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        loss = squares(model, data(8, 16, seed=5))
        with run.last_backward():
            loss.backward()
        assert run.session._early is not None and run.session._early.updates.updated
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        if steps:
            optimizer.step()
        optimizer.zero_grad()
        plain(model, run, optimizer, [data(8, 16, seed=s) for s in range(6, 9)], backwards)
    return list(model.parameters())


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_checkpoint_is_restored_between_backward_and_step(backwards: int) -> None:
    """The interrupted step is given up: the next ones are those of a run that goes on from the checkpoint plainly."""
    model = made(Body)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    plain(model, None, optimizer, [data(8, 16, seed=s) for s in range(4)])
    plain(model, None, optimizer, [data(8, 16, seed=s) for s in range(6, 9)], backwards)
    assert all(map(torch.equal, restored(backwards, False), model.parameters()))


def test_a_checkpoint_is_loaded_before_the_step() -> None:
    """What the step would do with the loaded state has been done with another one."""
    with pytest.raises(UpdatesInBackwardError, match="checkpoint is loaded between backward"):
        restored(1, steps=True)


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_hook_raises_after_the_step(backwards: int) -> None:
    """The optimizer has stepped: the next step is waited for, not this one again."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        plain(model, run, optimizer, batches[:4])
        handle = optimizer.register_step_post_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plain(model, run, optimizer, batches[4:5])
        handle.remove()
        optimizer.zero_grad()
        plain(model, run, optimizer, batches[5:], backwards)

    same_as_plain(Body, OPTIMIZERS["adam"], [data(8, 16, seed=s) for s in range(8)], loop)


def test_an_evaluation_before_the_step() -> None:
    """It would see weights that are updated already."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        plain(model, run, optimizer, batches[:4])
        loss = squares(model, batches[4])
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
        model.eval()
        with torch.no_grad():
            model(batches[4])

    with pytest.raises(UpdatesInBackwardError, match="evaluated before"):
        same_as_plain(Body, OPTIMIZERS["adam"], [data(8, 16, seed=s) for s in range(5)], loop)


def test_d5_a_branch_beside_the_forward_that_comes_later() -> None:
    """Autograd's error, and a warning that says which change it may have found."""
    model = made(Body)
    other = nn.Linear(16, 16)
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), *other.parameters()])
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="auto", profile_steps=1, verbose=False)
    with optimize(model, optimizer, **options) as run:
        for i, batch in enumerate(WIDE):
            beside = (other(batch) @ model.layers[1].weight.detach()).sum() if i == LATER else 0.0  # type: ignore[index]
            loss = squares(model, batch) + beside
            if i == LATER:
                break
            with run.last_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with (
            pytest.warns(UserWarning, match="may be a weight that was updated in this backward"),
            pytest.warns(UserWarning, match="backward raised after"),
            pytest.raises(RuntimeError, match="modified by an inplace operation"),
            run.last_backward(),
        ):
            loss.backward()
