"""A loop that trains gets a plan, or one warning says why it has none and what to write instead."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.silence import FORWARDS
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import QUIET, Batch, agrees, batches, loss_of, sgd, small, step, train


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((16,), 0.5)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.b


class Shifted(nn.Module):
    """Its forward saves nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b


SAVE_ONLY_INPUTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 3, 3)),
    "flatten": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
    "scaled": Scaled,
    "shifted": Shifted,
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def on_noise(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    losses = []
    for _ in range(5):
        losses.append(model(torch.randn(32, 16)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("name", SAVE_ONLY_INPUTS)
def test_forward_that_saves_only_inputs_and_parameters(name: str) -> None:
    """Its backward is seen: there is a plan, which drops nothing, and nothing is recorded any more."""
    run = agrees(on_noise, lambda: seeded(SAVE_ONLY_INPUTS[name]))
    found = state_of(run)
    assert (
        isinstance(found, Running)
        and found.program.empty
        and found.peaks.steps == 3
        and found.peaks.measured_nbytes is not None
    )


@pytest.mark.parametrize("name", ["linear", "shifted"])
def test_hopeless_budget_of_such_a_forward_is_refused_before_the_update(name: str) -> None:
    """Enough for what is there before a step, and not for its gradients and activations."""
    model = seeded(SAVE_ONLY_INPUTS[name])
    resident = sum(p.nbytes for p in model.parameters()) + 32 * 16 * 4
    optimizer = sgd(model)
    with pytest.raises(InfeasibleError, match="Nothing was updated"), optimize(model, optimizer, budget=resident + 64, **QUIET):
        on_noise(model, optimizer)
    assert not optimizer.state


def test_forward_without_a_backward_is_no_step() -> None:
    """If a forward's outputs were dropped before the optimizer steps, there is no step to plan for."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        for batch in batches(3):
            loss_of(model, batch)
            optimizer.step()
        assert states_of(run) and run.plan is None


Use = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


def weights_themselves(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model.head.weight[batch[0]].flatten(0, 1), batch[1].flatten())

    return train(model, optimizer, batches(9), loss)


def in_evaluation_mode(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return train(model.eval(), optimizer, batches(9))


def without_backward(model: nn.Module, _: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    return [loss_of(model, batch).detach() for batch in batches(FORWARDS + 5)]


def without_a_step(model: nn.Module, _: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    losses = [loss_of(model, batch) for batch in batches(1)]
    for batch in batches(FORWARDS + 5):
        losses.append(loss_of(model, batch))
        losses[-1].backward()
    return [loss.detach() for loss in losses]


def evaluated_within_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    losses = []
    for batch in batches(9):
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        model.eval()
        with torch.no_grad():
            losses += [loss_of(model, batch) for batch in batches(5)]
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def under_func(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        out = torch.func.functional_call(model, parameters, (batch[0],))
        return nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten())

    torch.manual_seed(1)
    for batch in batches(9):
        gradients = torch.func.grad(loss)(dict(model.named_parameters()), batch)
        for name, p in model.named_parameters():
            p.grad = gradients[name].detach()
        optimizer.step()
    return []


def texts(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in found if "MemOpt" in str(w.message)]


def dropout_free() -> nn.Module:
    model = small(dropout=0.0)
    model.norm = nn.Identity()  # its statistics could not be written under torch.func
    return model


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (weights_themselves, r"Write module\(x\) instead of module.forward\(x\)"),
        (in_evaluation_mode, r"Call model.train\(\)"),
        (without_backward, "no backward was seen"),
        (without_a_step, r"run.step\(\)"),
        (evaluated_within_steps, r"Evaluate after optimizer.step\(\)"),
        (under_func, "torch.func"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_one_warning_where_no_plan_comes(use: Use, text: str) -> None:
    """The plain bits, one warning that says what to do, and the same in the report."""
    with pytest.warns(UserWarning, match=text) as found:
        run = agrees(use, dropout_free)
    (said,) = texts(list(found))
    assert run.plan is None and said.removeprefix("MemOpt: t") in run.report()


@pytest.mark.filterwarnings("error:MemOpt")
def test_no_warning_while_paused_or_with_gradients_of_many_batches() -> None:
    """No warning about steps in `run.pause()`, or about a step of many batches."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        return [step(model, optimizer, batch) for batch in batches(8)]

    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        with run.pause():
            use(model, optimizer)
        for i, batch in enumerate(batches(3 * (FORWARDS - 2))):
            loss_of(model, batch).backward()
            if i % (FORWARDS - 2) == FORWARDS - 3:
                optimizer.step()
        assert run.plan is not None


def test_another_model_s_endless_step_is_named() -> None:
    """While a step of another model is observed, this one's run as they are: it is said when that does not end."""
    waiting, model = small(1), small()
    with (
        pytest.warns(UserWarning, match="another model is being observed") as found,
        optimize(waiting, sgd(waiting), budget="min", **QUIET),
        optimize(model, optimizer := sgd(model), budget="min", **QUIET),
    ):
        loss = loss_of(waiting, batches(1)[0])
        train(model, optimizer, batches(FORWARDS + 2))
        del loss
    assert len(texts(list(found))) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a layer"])
def test_compiled_code_is_named(whole: bool) -> None:
    """One warning says that nothing in compiled code is rebuilt; so does the report."""

    model = small()
    (model if whole else model.layers[1]).compile()
    with (
        torch.compiler.set_stance("force_eager"),  # the mark is enough: nothing need be compiled
        pytest.warns(UserWarning, match="inside of compiled code") as found,
        optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run,
    ):
        train(model, optimizer, batches(5))
        train(model, optimizer, batches(3, size=4))
    (text,) = texts(list(found))
    assert ("this model" if whole else "(layers.1)") in text
    assert run.plan is not None and "inside of compiled code" in " ".join(run.report().split())


def test_steps_that_differ_are_named() -> None:
    """Each step runs another op: what differs is said by name, also between steps that do not follow each other."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = small(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (torch.sin, torch.sin, torch.cos)[self.calls % 3](self.inner(x))

    lines: list[str] = []
    torch.manual_seed(0)
    model = Changing()
    options: dict[str, Any] = {"budget": "min", "profile_steps": 3}
    with pytest.MonkeyPatch.context() as patched, optimize(model, optimizer := sgd(model), **options) as run:
        patched.setattr(run.session, "say", lines.append)
        with pytest.warns(UserWarning, match="its forward is another one every step"):
            train(model, optimizer, batches(9))
    changed = [line for line in lines if "changed while observing" in line]
    assert changed and all("aten::cos" in line and "aten::sin" in line for line in changed)
    assert run.status().phase == "unplanned"


def lines_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[list[str], Run]:
    lines: list[str] = []
    with optimize(model, optimizer, **{"budget": "min", "profile_steps": 2} | options) as run:
        run.session.say = lines.append
        on_noise(model, optimizer)
    return lines, run


@pytest.mark.parametrize(
    ("optimizer", "largest", "text"),
    [
        (lambda m: torch.optim.Adam(m.parameters(), foreach=True), "optimizer state", "foreach=False in the optimizer"),
        (lambda m: torch.optim.SGD(m.parameters(), fused=True), "gradients", "optimizer_in_backward='auto'"),
    ],
    ids=["update", "gradients"],
)
def test_peak_that_no_plan_lowers_is_explained(optimizer: Any, largest: str, text: str) -> None:
    """Where the smallest plan is as large as the unmodified step: what is at the peak, and what would lower it."""
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 16)))
    lines, run = lines_of(model, optimizer(model))
    assert run.plan is not None and run.plan.predicted_peak_nbytes == run.plan.unmodified_peak_nbytes
    (line,) = [line for line in lines if "At the peak" in line]
    assert largest in line and text in line


def in_two_sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Three small batches, then large ones."""
    return [step(model, optimizer, batch) for batch in (*batches(3, size=8), *batches(4, size=64))]


def test_later_batches_that_no_plan_fits_train_on_by_the_smallest() -> None:
    """The first batches fit, so nothing was refused before the first update: training goes on, and one line names a budget
    that works. `on_exceed="raise"` stops it.
    """
    run = agrees(in_two_sizes)
    small_nbytes = min(s.plan.unmodified_peak_nbytes for s in states_of(run).values() if isinstance(s, Running))
    needed = run.plan.predicted.needed_nbytes if run.plan is not None else 0
    del run
    gc.collect()
    budget = (small_nbytes + needed) // 2
    options = QUIET | {"budget": budget}
    with pytest.warns(UserWarning, match="the budget is not kept: no plan of this step fits") as caught:
        run = agrees(in_two_sizes, **options)
    assert len([w for w in caught if "above the budget" in str(w.message)]) == 0, "said once"
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    named = int(re.search(r"budget=(\d+) or more", str(caught[0].message))[1])  # type: ignore[index]
    del run
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(in_two_sizes, **(QUIET | {"budget": named + 64}))  # the losses that are held
    model = small()
    with pytest.raises(InfeasibleError), optimize(model, optimizer := sgd(model), on_exceed="raise", **options):
        in_two_sizes(model, optimizer)
