"""Plans that park what rests predict the bytes that it moves and takes, in steps that update only a part of it, by several
optimizers, or that come to take more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import Plan, optimize
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.session.observe.resident import away_state
from tests.cpu.parking.test_trained_weights import Model, batch, known_times

pytestmark = pytest.mark.usefixtures(known_times.__name__)
_SLACK_NBYTES = 4096
"""A loop may hold a few bytes less than in the observed steps."""
Loss = Callable[[nn.Module, int], Tensor]
Optimizers = Callable[[nn.Module], Sequence[optim.Optimizer]]


def mean(model: nn.Module, i: int) -> Tensor:
    return model(batch()).square().mean()


def adam(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters())]


class Run:
    """Steps of a run. `plans`, `moved`: the plan in force after each step, and the bytes of what rests that it has moved."""

    def __init__(
        self, in_backward: str, loss: Loss = mean, optimizers: Optimizers = adam, model: Callable[[], nn.Module] = Model
    ) -> None:
        torch.manual_seed(0)
        built = model()
        updates = optimizers(built)
        self.plans: list[Plan | None] = []
        self.moved: list[int] = []
        options = {"budget": "min", "offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": in_backward}
        with optimize(built, updates, **options) as run:
            for i in range(14):
                before = run.session._at_rest.moved_nbytes
                for each in updates:
                    each.zero_grad()
                found = loss(built, i)
                with run.last_backward() if in_backward != "never" else contextlib.nullcontext():
                    found.backward()
                for each in updates:
                    each.step()
                self.plans.append(run.plan)
                self.moved.append(run.session._at_rest.moved_nbytes - before)
            self.status = run.status()

    @property
    def plan(self) -> Plan:
        plan = self.plans[-1]
        assert plan is not None
        return plan

    @property
    def predicted_nbytes(self) -> int:
        """Bytes that the last step was to move."""
        return sum(2 * each.nbytes for each in self.plan.states) + sum(each.moved_nbytes for each in self.plan.weights)


def test_of_a_module_only_the_weights_that_are_updated_late_come_for_that() -> None:
    run = Run("auto")
    early = set(run.plan.updates)
    assert run.status.graph is not None
    parameters = {t.id for t in run.status.graph.tensors if t.kind == "parameter"}
    assert early and parameters - early, "the plan updates some early, and some after backward"
    assert len(run.plan.weights) == 6 and run.moved[-1] == run.predicted_nbytes


class Cut(Model):
    """Its first modules get no gradient, although nobody has frozen them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x.detach() if i == 2 else x)
        return self.last(x)


@pytest.mark.parametrize("in_backward", ["never", "always"])
def test_weights_without_a_gradient_move_for_no_update(in_backward: str) -> None:
    run = Run(in_backward, optimizers=lambda model: [optim.SGD(model.parameters(), lr=0.1)], model=Cut)
    assert len(run.plan.weights) == 6 and run.moved[-1] == run.predicted_nbytes


def test_the_step_of_another_optimizer_has_no_weights_of_backward() -> None:
    def two(model: nn.Module) -> list[optim.Optimizer]:
        blocks = list(model.get_submodule("blocks").parameters())
        others = [p for p in model.parameters() if all(p is not q for q in blocks)]
        return [optim.AdamW(blocks), optim.SGD(others, lr=0.1)]

    run = Run("never", optimizers=two)
    assert len(run.plan.weights) == 6
    assert run.status.measured_peak_nbytes is not None
    assert 0 <= run.plan.predicted.needed_nbytes - run.status.measured_peak_nbytes <= _SLACK_NBYTES


def test_an_update_in_a_hook_has_its_weight_once() -> None:
    """Weights that are parked are on the device in backward, where the hook runs: none comes for the update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1024))
    of = {p: optim.Adadelta([p]) for p in model.parameters()}

    def updates(p: Tensor) -> None:
        of[p].step()
        of[p].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(updates) for p in of]
    with optimize(model, list(of.values()), budget="min", offload="disk", max_slowdown=1e6) as run:
        for _ in range(8):
            model(torch.randn(16, 64)).square().mean().backward()
        status = run.status()
    for hook in hooks:  # it holds the parameter that holds it
        hook.remove()
    assert status.plan is not None and status.measured_peak_nbytes is not None
    assert {unit.module for unit in status.plan.weights if unit.are_trained} == {"0", "2", "4"}
    assert {"0.weight", "2.weight", "4.weight"} <= {state.parameter for state in status.plan.states}
    more_nbytes = status.plan.predicted.needed_nbytes - status.measured_peak_nbytes
    assert 0 <= more_nbytes < model[4].weight.nbytes / 16


@pytest.mark.parametrize("in_backward", ["never", "always"])
def test_a_step_that_comes_to_take_more_is_still_parked(in_backward: str) -> None:
    """It is observed again, with nothing parked, and so is compared with the step before as that is with nothing parked."""

    def with_decay(model: nn.Module, i: int) -> Tensor:
        decay = sum(p.square().mean() for p in model.parameters()) if i > 5 else 0.0
        return mean(model, i) + decay

    run = Run(in_backward, with_decay)
    before, after = run.plans[5], run.plan
    assert before is not None and after is not before
    assert len(after.weights) == len(before.weights) == 6
    parameters_nbytes = sum(p.nbytes for p in Model().parameters())
    grown_nbytes = after.predicted.peak_nbytes - before.predicted.peak_nbytes
    assert 0 < grown_nbytes < 2 * parameters_nbytes, "squares of all weights, and their gradients"
    assert run.status.measured_peak_nbytes is not None
    assert run.status.measured_peak_nbytes <= after.predicted.needed_nbytes


def test_what_only_another_shape_needs_parked_stays_away(recwarn: pytest.WarningsRecorder) -> None:
    """Batches of two shapes take turns, each with a plan. Nothing comes back between them, and nothing is above the budget."""
    torch.manual_seed(0)
    width, mib = 192, 1 << 20
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4))
    )
    optimizer = optim.AdamW(model.parameters())
    options = {"budget": 6 * mib, "offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": "never"}
    parked: list[int] = []
    with optimize(model, optimizer, **options) as run:
        for i in range(14):
            optimizer.zero_grad()
            model(torch.randn(24 if i < 4 or i % 2 else 400, width)).square().mean().backward()
            optimizer.step()
            parked.append(sum(is_away(p) for p in model.parameters()) + len(away_state([optimizer])))
        status = run.status()
    assert status.phase == "planned" and status.measured_peak_nbytes is not None
    assert status.measured_peak_nbytes <= 6 * mib
    assert parked[-1] == parked[-2] > 0
    assert not [str(each.message) for each in recwarn if "MemOpt" in str(each.message)]
