"""Updates in backward in plain loops: marked last backwards, P19, F1, F10, D5, D7; the smallest plan is in force."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import engine
from lightning_memopt.plan import early
from tests.cpu.lib.early import OPTIMIZERS, WIDE, Make, plain, same_as_plain
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import counted_nbytes
from tests.cpu.lib.models import Body, data, made, squares


class Matrices(nn.Module):
    """What all optimizers take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)).exp().sin(), 0.1)
        return x


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_fifty_steps(name: str, updates: list[Tensor]) -> None:
    """Parameters and state of the optimizer's own steps, with the smallest plan in force; all but the first update early."""
    run = same_as_plain(Matrices, OPTIMIZERS[name], [data(24, 16, seed=s % 7) for s in range(50)])
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    assert len(updates) == 49 * 3 and not run.session._early.late


def test_f1_accumulation(updates: list[Tensor]) -> None:
    """EXACT: two backwards a step, the last one marked; gradients are summed before anything is updated."""
    run = same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, lambda *a: plain(*a, backwards=2))
    assert len(updates) == 4 * len(list(run.session.model.parameters()))


def test_gradients_end_early_and_peak_is_predicted() -> None:
    """The graph frees each gradient before the next layer's backward; predicted and measured peak agree within 1 %; the peak of
    a model that is mostly parameters falls by most of their gradients, with and without a plan.
    """

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(m for _ in range(6) for m in (nn.Linear(128, 128), nn.Tanh())))

    batches = [data(4, 128, seed=s) for s in range(5)]
    peaks = {}
    for mode in ("never", "always"):
        for budget in ("1GiB", "min"):
            run = state = None  # what is alive counts
            held = counted_nbytes()
            run = same_as_plain(Deep, OPTIMIZERS["adam"], batches, budget=budget, mode=mode)
            state = state_of(run)
            assert abs(state.plan.predicted_peak_nbytes / state.peaks.measured_nbytes - 1) < 0.01
            peaks[mode, budget] = state.peaks.measured_nbytes - held
            graph = state.program.graph
            gradients = [t for t in graph.tensors if t.kind == "gradient" and t.nbytes == 128 * 128 * 4]
            last = max(op.at for op in graph.ops if op.phase == "backward")
            assert len(gradients) >= 6 and (sum(t.freed_at >= last for t in gradients) <= 1) is (mode == "always")
    weights = 6 * 128 * 128 * 4
    for budget in ("1GiB", "min"):
        assert peaks["always", budget] < peaks["never", budget] - 0.7 * weights


def test_what_we_read_ourselves_between_backward_and_update(updates: list[Tensor]) -> None:
    """Without the native engine, each op of an observed step within a budget asks which gradients are still to come."""
    with engine.without():
        same_as_plain(Matrices, OPTIMIZERS["adam"], [data(24, 16, seed=s) for s in range(3)], budget="1GiB")
    assert len(updates) == 2 * 3


@pytest.mark.parametrize("backwards", [2, 3])
@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_backwards_before_the_last_one_are_predicted(budget: str, backwards: int) -> None:
    """They free no gradient. With the smallest plan, the step has its peak at their end, where most is rebuilt. Before a second
    and last backward, the gradients that are still to come are predicted, too: here, that of one layer.
    """

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(128, 128)
            self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(128, 128), nn.Tanh())))

        def forward(self, x: Tensor) -> Tensor:
            wide = self.first(x).repeat(64, 1).sin().exp()
            return self.layers(wide.unflatten(0, (64, -1)).mean(0))

    loop = partial(plain, backwards=backwards)
    run = same_as_plain(Deep, OPTIMIZERS["adam"], [data(4, 128, seed=s) for s in range(6)], loop, budget=budget)
    state = state_of(run)
    assert state.peaks.measured_nbytes is not None and not state.drift.deviated
    beyond = state.plan.predicted.needed_nbytes - state.peaks.measured_nbytes
    assert abs(beyond - (128 * 129 * 4 if backwards == 2 else 0)) < 0.01 * state.peaks.measured_nbytes
    assert state.peaks.measured_nbytes <= state.plan.budget_nbytes


def test_gradients_of_the_first_step_are_not_there_later() -> None:
    """A loop that lets go of gradients after the forward, as Lightning does: those of the first step, which updates nothing
    early, are in the observed one and in no other. Predicted and measured peak agree within 1 %.
    """

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        for batch in batches:
            loss = squares(model, batch)
            optimizer.zero_grad()
            with contextlib.nullcontext() if run is None else run.last_backward():
                loss.backward()
            optimizer.step()

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(m for _ in range(6) for m in (nn.Linear(128, 128), nn.Tanh())))

    run = same_as_plain(Deep, OPTIMIZERS["sgd"], [data(32, 128, seed=s) for s in range(5)], loop)
    state = state_of(run)
    assert abs(state.plan.predicted_peak_nbytes / state.peaks.measured_nbytes - 1) < 0.01


class Detached(Body):
    """D5: the last weight is also read, detached, by the first layers, whose backward comes after its gradient is final."""

    def between(self, h: Tensor, i: int) -> Tensor:
        return h * torch.tanh(self.layers[-1].weight.detach().mean() + h) if i == 0 else h


class Checkpointed(Detached):
    """The same inside of a region that the user's own checkpointing runs again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        first = lambda x: self.between(torch.tanh(self.layers[0](x)).exp(), 0).sin()  # noqa: E731
        x = checkpoint(first, x.requires_grad_(), use_reentrant=self.reentrant)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)).exp().sin()
        return x


class Reentrant(Checkpointed):
    """Tied weights in a nested backward: two gradients in one backward."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


@pytest.mark.parametrize("name", ["sgd", "adamw foreach", "adamw fused"])
@pytest.mark.parametrize("cls", [Detached, Checkpointed, Reentrant])
def test_d5_weight_is_read_after_its_gradient_is_final(cls: type[nn.Module], name: str, updates: list[Tensor]) -> None:
    """EXACT: what reads it in backward keeps its update where it was; what only a rebuild would read it for is kept."""
    run = same_as_plain(cls, OPTIMIZERS[name], WIDE)
    late = run.session._early.late
    assert late == {Detached: set(), Checkpointed: {"layers.2.weight"}, Reentrant: {"layers.0.weight"}}[cls]
    assert len(updates) == 4 * (len(list(run.session.model.parameters())) - len(late))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 1e-2), lambda p: torch.optim.Adagrad(p, 1e-2)])
def test_d7_sparse_gradients(make: Make, updates: list[Tensor]) -> None:
    """EXACT: they are left to the step; dense ones beside them are not."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(32, 16, sparse=True), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.embed((x.abs() * 10).long() % 32))

    run = same_as_plain(Sparse, make, [b[:, 0] for b in WIDE])
    assert run.session._early.late == {"embed.weight"} and len(updates) == 4 * 6


def test_f10_steps_hooks_rates_and_users_gradient_hooks(updates: list[Tensor]) -> None:
    """A schedule moves once a step, post-hooks of the step are called once, gradient hooks of the user's see the gradient."""
    seen: list[Any] = []

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        norms: list[float] = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = optimizer.register_step_post_hook(lambda *_: norms.append(-1.0))
        hooks = [p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item())) for p in model.parameters()]
        for batch in data:
            plain(model, run, optimizer, [batch])
            schedule.step()
        for hook in [*hooks, handle]:
            hook.remove()
        seen.append((norms, schedule.last_epoch, optimizer.param_groups[0]["lr"]))

    same_as_plain(Body, OPTIMIZERS["adamw"], WIDE, loop)
    assert seen[0] == seen[1] and seen[0][0].count(-1.0) == len(WIDE) and updates


def test_given_plan_says_what_is_updated(tmp_path: Path, updates: list[Tensor]) -> None:
    """A plan that was made with updates in backward brings them along, from the first step on."""
    run = same_as_plain(Body, OPTIMIZERS["sgd"], WIDE)
    run.save_plan(str(tmp_path / "plan.json"))
    assert run.plan is not None and len(run.plan.updates) >= 5
    assert run.plan.updates == early(state_of(run).program.graph)
    updates.clear()
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(plan=tmp_path / "plan.json", optimizer_in_backward="always", verbose=False)
    with optimize(model, optimizer, **options) as given:
        plain(model, given, optimizer, WIDE)
    assert len(updates) >= 5 * len(WIDE)
    reference = made(Body)
    plain(reference, None, OPTIMIZERS["sgd"](reference.parameters()), WIDE)
    assert all(map(same_bits, reference.parameters(), model.parameters()))
