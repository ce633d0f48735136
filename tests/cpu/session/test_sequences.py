"""A step is a sequence of calls of the model up to the update: one graph, one plan, by both engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.native import counter, engine
from lightning_memopt.session.forward.sequence import Sequence
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observing import Observing
from tests.cpu.lib.inside import current_of, states_of
from tests.cpu.lib.loops import QUIET, agrees, budget_at, seeded
from tests.cpu.lib.said import Said

needs_counter = pytest.mark.skipif(counter() is None, reason="no native counter: nothing else measures a step")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def net() -> nn.Module:
    return seeded(Net)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


Loss = Callable[[nn.Module, int], Tensor]


def x(rows: int = 256) -> Tensor:
    return torch.randn(rows, 32)


def trained(loss_of: Loss, steps: int = 8) -> Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]:
    """A loop over the losses of each step."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for i in range(steps):
            loss = loss_of(model, i)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return use


def time_steps(model: nn.Module, _: int) -> Tensor:
    return torch.stack([model(x()).square().mean() for _ in range(6)]).sum()


def chain(model: nn.Module, _: int) -> Tensor:
    y = x()
    for _ in range(4):
        y = y + 0.1 * model(y)
    return y.square().mean()


def direct(model: nn.Module, _: int) -> Tensor:
    """What a call returns is what the next one is given."""
    return model(model(model(x()))).square().mean()


def two_shapes(model: nn.Module, _: int) -> Tensor:
    return model(x()).square().mean() + model(x(64)).square().mean()


def targets(model: nn.Module, _: int) -> Tensor:
    losses = []
    for _ in range(3):
        batch = x()
        with torch.no_grad():
            target = model(batch.flip(0))
        losses.append((model(batch) - target).square().mean())
    return torch.stack(losses).sum()


def moves(model: nn.Module, _: int) -> Tensor:
    """Autograd frees the graphs of the first calls before any backward."""
    for _ in range(2):
        model(x()).argmax()
    return model(x()).square().mean() + model(x()).mean()


def maml(model: nn.Module, _: int) -> Tensor:
    losses = []
    for _ in range(2):
        inner = torch.autograd.grad(model(x()).square().mean(), list(model.parameters()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), inner, strict=True)}
        losses.append(torch.func.functional_call(model, fast, (x(),)).square().mean())
    return torch.stack(losses).sum()


def penalty(model: nn.Module, _: int) -> Tensor:
    batch = x().requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return model(batch + 0.1 * slope).square().mean() + slope.square().mean()


def kept_result_written(model: nn.Module, _: int) -> Tensor:
    """The result of one call changes before the next call reads it, and no version counter shows the change."""
    y = x()
    for k in range(4):
        y = model(y)
        if k % 2:
            y.data.mul_(1.5)
        else:
            y.detach().numpy()[:] *= 0.5
    return y.square().mean()


def weights_written(model: nn.Module, _: int) -> Tensor:
    y = x()
    for _ in range(3):
        y = model(y)
        for p in model.parameters():
            p.data.mul_(0.999)
    return y.square().mean()


EVERY = [time_steps, chain, direct, two_shapes, targets, moves, maml, penalty, kept_result_written, weights_written]


@pytest.fixture(params=["native", "python"])
def either_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(engine, "_module", None)
    elif engine.loaded() is None:
        pytest.skip("there is no native engine")


@needs_counter
@pytest.mark.parametrize("loss_of", EVERY, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("either_engine")
def test_exact_and_predicted(loss_of: Loss) -> None:
    """The smallest plan has the plain run's bits; it is the only plan of the run, and no step deviates from it."""
    run = agrees(trained(loss_of), net, adam)
    status, found = run.status(), list(states_of(run).values())
    assert len(found) == 1 and isinstance(found[0], Running) and not found[0].drift.deviated
    assert status.measured_peak_nbytes is not None and status.predicted_peak_nbytes is not None
    assert abs(status.measured_peak_nbytes - status.predicted_peak_nbytes) <= 1 << 12


@needs_counter
@pytest.mark.usefixtures("either_engine")
def test_half_of_the_plain_peak_is_kept() -> None:
    """Each call needs little; all of them together have a graph six times as large."""
    run = agrees(trained(time_steps), net, adam)
    budget = budget_at(run, 0.5)
    assert run.status().predicted_peak_nbytes is not None and run.status().predicted_peak_nbytes < budget
    found = agrees(trained(time_steps), net, adam, budget=budget).status()
    assert found.phase == "planned" and found.measured_peak_nbytes is not None and found.measured_peak_nbytes <= budget


def test_two_shapes_before_one_backward_are_planned_after_the_observed_steps(said: Said) -> None:
    run = agrees(trained(two_shapes, steps=3), net, adam, profile_steps=3, verbose=True)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    assert "before one backward" not in said.taken()


def test_another_number_of_calls_in_each_step() -> None:
    """In the end one plan, made for the most calls, serves all steps: a step with fewer calls skips the rest of it."""

    def some(model: nn.Module, i: int) -> Tensor:
        return torch.stack([model(x()).square().mean() for _ in range(2 + i % 4)]).sum()

    run = agrees(trained(some, steps=16), net, adam)
    found = current_of(run)
    assert isinstance(found, Running) and found.peaks.steps >= 8 and not found.drift.deviated
    assert len(found.program.calls) == 4


def test_batches_of_another_size_are_expected_to_go_on_alike() -> None:
    """The first call of a smaller batch gets the plan of as many calls."""

    def sized(model: nn.Module, i: int) -> Tensor:
        rows = 256 if i < 4 else 250 - i
        return torch.stack([model(x(rows)).square().mean() for _ in range(3)]).sum()

    run = agrees(trained(sized), net, adam)
    found = list(states_of(run).values())
    assert all(isinstance(state, Running) and not state.drift.deviated for state in found)
    assert sum(state.lender is None for state in found) == 1


def test_accumulated_forwards_of_one_and_of_two_calls() -> None:
    """Each forward of the step has a plan for its calls."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(8):
            (model(x()).square().mean() + model(x()).mean()).backward()
            loss = model(x()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    run = agrees(use, net, adam)
    found = list(states_of(run).values())
    assert all(isinstance(state, Running) and not state.drift.deviated for state in found)
    assert sorted(len(state.program.calls) for state in found) == [0, 1]


def test_a_call_raises_and_the_loop_goes_on() -> None:
    def raising(model: nn.Module, i: int) -> Tensor:
        losses = []
        for k in range(4):
            with contextlib.suppress(RuntimeError):
                losses.append(model(torch.randn(256, 31) if k == 2 and i % 3 == 2 else x()).square().mean())
        return torch.stack(losses).sum()

    run = agrees(trained(raising, steps=9), net, adam)
    assert run.plan is not None


def test_a_saved_plan_of_several_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    run = agrees(trained(time_steps), net, adam)
    run.save_plan(path)
    model = net()
    with optimize(model, optimizer := adam(model), budget="100%", plan=path, **QUIET) as given:
        trained(time_steps)(model, optimizer)
        found = list(states_of(given).values())
    assert len(found) == 1 and isinstance(found[0], Running) and found[0].drift.matched and not found[0].drift.deviated
    assert not any(isinstance(state, Observing) for state in found)


def test_an_engine_ends_with_its_graph_between_two_calls() -> None:
    """If the graph of a call is dropped, all that the call held is freed at once, without the garbage collector."""
    model = net()
    with optimize(model, optimizer := adam(model), budget="min", **QUIET) as run:
        use = trained(time_steps, steps=3)
        use(model, optimizer)
        y = model(x())
        engine = run.session._sequence.engine
        assert engine is not None and engine() is not None
        del y
        assert engine() is None


CALL, SMALL = (0, (True,), (((8, 3), "f", "cpu", False),)), (0, (True,), (((4, 3), "f", "cpu", False),))


def test_what_is_expected() -> None:
    sequence = Sequence()

    def step(*calls: tuple) -> tuple:
        sequence.begins(calls[0])
        for call in calls[1:]:
            sequence.goes_on(call)
        sequence.step_ended()
        return sequence.last

    assert step(CALL) == CALL and sequence.begins(CALL, no_backward=True) == CALL
    sequence.given_up()
    two, three = step(CALL, SMALL), step(CALL, CALL, CALL)
    assert len({CALL, two, three}) == 3
    step(CALL)
    assert sequence.begins(CALL) == three, "the longest"
    assert sequence.expects(CALL) and not sequence.expects(SMALL)
    sequence.goes_on(CALL)
    sequence.goes_on(CALL)
    assert not sequence.expects(CALL) and sequence.now == three
    sequence.step_ended()
    assert sequence.begins(SMALL) == (*SMALL, (), SMALL[2], (), SMALL[2]), "as one of another size"
    sequence.step_ended()
    for _ in range(16):
        step(CALL)
    assert sequence.begins(CALL) == CALL, "it has changed for good"
