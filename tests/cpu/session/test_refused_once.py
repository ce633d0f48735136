"""The budget that a refusal names works at the first try. So does the number that `budget="min"` reports."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import write_plan
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.resident import resident_nbytes, resident_tensors
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, batches, counted_nbytes, loss_of, small
from tests.cpu.lib.observed_graph import CPU

STEPS = 6


class Digits(nn.Module):
    """Convolutions, and a linear layer that has nearly all of the parameters: the update is the peak of the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convs(x))


def digits(steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(4, 1, 16, 16), torch.randint(0, 10, (4,))) for _ in range(steps)]


class Loop:
    """A plain loop: `zeroed` says when gradients are let go of: before the forward, after it, or after the step."""

    def __init__(self, build: Callable[[], nn.Module], make: Callable[[nn.Module], Any], zeroed: str = "before") -> None:
        self.build, self.make, self.zeroed = build, make, zeroed
        self.model, self.optimizer = build(), None
        self.updates = 0

    def run(self, budget: Any, profile_steps: int = 2) -> Running | None:
        """Train from the start; the state at the end. Raises what `optimize` raises."""
        self.model = self.build()
        optimizer, self.updates = self.make(self.model), 0
        with optimize(self.model, optimizer, budget=budget, **(QUIET | {"profile_steps": profile_steps})) as run:
            self.train(optimizer)
            return state_of(run) if run.status().phase == "planned" else None

    def train(self, optimizer: optim.Optimizer) -> None:
        wide = isinstance(self.model, Digits)
        for x, y in digits(STEPS) if wide else batches(STEPS):
            if self.zeroed == "before":
                optimizer.zero_grad()
            output = self.model(x)
            if self.zeroed == "after":
                optimizer.zero_grad()
            loss = F.cross_entropy(output if wide else output.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            self.updates += 1
            if self.zeroed == "last":
                optimizer.zero_grad()

    def refused(self, budget: int, profile_steps: int = 2) -> tuple[int | None, str]:
        """The budget that a refusal names, and what it says. Afterwards nothing of the refused run is in memory."""
        try:
            self.run(budget, profile_steps)
        except InfeasibleError as error:
            found = error.smallest_nbytes, str(error)
        else:
            raise AssertionError("not refused")
        assert self.updates == 0 and "Nothing was updated" in found[1]
        fresh = self.build()
        assert all(same_bits(p, q) for p, q in zip(self.model.parameters(), fresh.parameters(), strict=True))
        self.model = nn.Module()
        gc.collect()
        return found

    def budget_nbytes(self) -> int:
        """A budget that holds what is there before a step, and next to nothing of the step."""
        model = self.build()
        optimizer = self.make(model)
        nbytes = counted_nbytes() + 40_000
        del optimizer
        return nbytes


MAKERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.01),
    "Adam": lambda m: optim.Adam(m.parameters()),
    "Adam foreach": lambda m: optim.Adam(m.parameters(), foreach=True),
    "Adam fused": lambda m: optim.Adam(m.parameters(), fused=True),
    "Adadelta": lambda m: optim.Adadelta(m.parameters()),
    "Adadelta foreach": lambda m: optim.Adadelta(m.parameters(), foreach=True),
    "RAdam": lambda m: optim.RAdam(m.parameters()),
    "ASGD foreach": lambda m: optim.ASGD(m.parameters(), foreach=True),
}


@pytest.mark.parametrize(
    ("build", "optimizer", "profile_steps", "zeroed"),
    [
        *((Digits, name, 2, "before") for name in MAKERS),
        (Digits, "Adam foreach", 1, "before"),
        (Digits, "Adam", 3, "after"),
        (small, "SGD", 2, "after"),
        (small, "Adam", 1, "last"),
        (small, "Adam", 3, "after"),
    ],
)
def test_the_budget_that_is_named_works(build: Any, optimizer: str, profile_steps: int, zeroed: str) -> None:
    """Refused once, before any update. The second run is not refused, and its measured peak is within the named budget."""
    loop = Loop(build, MAKERS[optimizer], zeroed)
    named, message = loop.refused(loop.budget_nbytes(), profile_steps)
    assert named is not None and f"budget={named} " in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = loop.run(named, profile_steps)
    assert state is not None and state.peaks.measured_nbytes is not None and state.peaks.measured_nbytes <= named


def adversaries(budget: int | None, apart: bool) -> int | None:
    """A generator and its judge, whose updates take turns; the judge's gradients of the step before are there until its turn.
    `apart`: each has a block of its own. Returns the budget that a refusal names; None if the run came to its end.
    """
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    judge = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    for_maker, for_judge = optim.Adam(maker.parameters()), optim.Adam(judge.parameters())
    options = QUIET | {"budget": counted_nbytes() + 120_000 if budget is None else budget}
    with contextlib.ExitStack() as blocks:
        try:
            if apart:
                blocks.enter_context(optimize(maker, for_maker, **options))
                blocks.enter_context(optimize(judge, for_judge, **options))
            else:
                blocks.enter_context(optimize(maker, [for_maker, for_judge], **options))
            for _ in range(STEPS):
                judge.zero_grad()
                (-judge(torch.rand(64, 64)).mean()).backward()
                made = maker(torch.randn(64, 16))
                judge(made.detach()).mean().backward()
                for_judge.step()
                maker.zero_grad()
                (-judge(made).mean()).backward()
                for_maker.step()
        except InfeasibleError as error:
            return error.smallest_nbytes
    return None


@pytest.mark.parametrize("apart", [True, False])
def test_a_number_has_room_for_those_whose_turn_comes_later(apart: bool) -> None:
    """State that the other optimizer of a GAN makes, in the same block or another one, and gradients freed at its turn."""
    named = adversaries(None, apart)
    assert named is not None
    gc.collect()
    assert adversaries(named, apart) is None


@pytest.mark.parametrize("optimizer", ["Adadelta foreach", "RAdam"])
@pytest.mark.parametrize("profile_steps", [1, 2])
def test_the_number_that_min_reports_can_be_set(optimizer: str, profile_steps: int, tmp_path: Path) -> None:
    """The smallest plan keeps the budget of its own number, with what the first update takes."""
    loop = Loop(Digits, MAKERS[optimizer])
    state = loop.run("min", profile_steps)
    assert state is not None
    path = str(tmp_path / "plan.json")
    write_plan(path, state.plan, state.program.graph)  # what was foreseen can be written down
    again = loop.run(state.plan.budget_nbytes, profile_steps)
    assert again is not None and again.plan.budget_nbytes == state.plan.budget_nbytes


def test_the_number_that_min_reports_can_be_set_however_little_time_solvers_have() -> None:
    """Also where tensors may be parked, though these are too small for it."""

    def trained(budget: Any, **options: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Tanh())))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with optimize(model, optimizer, budget=budget, offload="disk", max_slowdown=1e6, **QUIET, **options) as run:
            for _ in range(STEPS):
                model(torch.ones(31, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            plan = run.status().plan
        assert plan is not None
        return plan.budget_nbytes

    smallest_nbytes = trained("min")
    assert trained(smallest_nbytes, solver_seconds=1e-9) == smallest_nbytes


def test_what_later_updates_take_is_planned_for() -> None:
    """RAdam takes more from its sixth step on than in the observed ones: the plan says so before."""
    model = Digits()
    with optimize(model, o := optim.RAdam(model.parameters()), budget="min", **QUIET) as run:
        for x, y in digits(3):
            o.zero_grad()
            F.cross_entropy(model(x), y).backward()
            o.step()
        assert run.plan is not None
        nbytes = sum(p.nbytes for p in model.parameters())
        # parameters, gradients, two moments, and of the largest layer the temporaries of the rectified update
        assert run.plan.unmodified_peak_nbytes >= 4 * nbytes + 4 * model.head[1].weight.nbytes  # type: ignore[index, union-attr, operator]


def lbfgs(budget: Any, history: int = 8, steps: int = 5) -> tuple[Running, int]:
    """A loop with a closure: the state, and the bytes that are there at the end."""
    model = small(dropout=0.0)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=history)
    with optimize(model, optimizer, budget=budget, **QUIET) as run:
        for batch in batches(steps):

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        state = state_of(run)
    assert isinstance(state, Running)
    return state, resident_nbytes(resident_tensors(model, [optimizer], batches(1)[0]), CPU)


def test_a_history_that_grows_is_planned_for_its_end() -> None:
    """LBFGS: what is planned for holds the full history before it is there, so that no later step asks for another plan."""
    state, held = lbfgs("min")
    gradients = sum(p.nbytes for p in small().parameters())
    planned = sum(t.nbytes for t in state.program.graph.tensors if t.born_at == BEFORE and t.kind != "gradient")
    assert planned >= held - gradients and state.past.replanned == 0
    again = [t for t in state.program.graph.tensors if t.kind == "optimizer_state" and t.born_at > BEFORE]
    assert not again, "what the last update made is part of the history"


def test_an_optimizer_that_is_not_torchs_is_said_not_to_be_known() -> None:
    """The step of an unknown optimizer could do anything, so it is not rehearsed: the message says its bytes come on top."""

    class Own(optim.SGD):
        pass

    loop = Loop(small, lambda m: Own(m.parameters(), lr=0.1))
    assert "What the update takes is not known" in loop.refused(loop.budget_nbytes())[1]


def closures(budget: int) -> int | None:
    """Steps of several closures each. Returns the budget that a refusal names; None if the run came to its end."""
    model, (data,) = small(dropout=0.0), batches(1)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        return loss

    try:
        with optimize(model, optimizer, budget=budget, **(QUIET | {"profile_steps": 3})):
            for _ in range(STEPS):
                optimizer.step(closure)
    except InfeasibleError as error:
        return error.smallest_nbytes
    return None


def test_a_number_has_room_for_what_lbfgs_holds_between_closures() -> None:
    """The budget is named in the first closure, before LBFGS has a direction, a second gradient or any history."""
    named = closures(counted_nbytes() + 120_000)
    gc.collect()
    assert named is not None and closures(named) is None


def refusal_of_two_nets(several: bool) -> str:
    nets = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)])
    made = [optim.SGD(net.parameters(), lr=0.1) for net in nets] if several else [optim.SGD(nets.parameters(), lr=0.1)]
    budget = counted_nbytes() + 120_000
    with (
        pytest.raises(InfeasibleError, match="No plan of this model") as refused,
        optimize(nets, made, budget=budget, verbose=False),
    ):
        for net, optimizer in zip(nets, made, strict=False):
            net(torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize("several", [True, False])
def test_what_other_optimizers_do_is_not_known_before_the_first_update(several: bool) -> None:
    assert ("What other optimizers do after this update has not run yet" in refusal_of_two_nets(several)) == several
