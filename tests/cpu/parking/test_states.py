"""Optimizer state that is parked between updates: bits, bytes, readers, holders, and what goes wrong."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError, OffloadError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import Plan
from lightning_memopt.plan.files import read_plan, write_plan
from lightning_memopt.runtime import state_copies
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.parked_states import ParkedStates
from lightning_memopt.runtime.state_copies import parkable
from lightning_memopt.runtime.state_dicts import ParkedState
from lightning_memopt.runtime.tiers import DiskTier
from tests.cpu.lib.engines import HAS_NATIVE, elements
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given

MIB = 1 << 20
KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "momentum": partial(optim.SGD, momentum=0.9),
    "adamax": optim.Adamax,
    "rmsprop": lambda p, lr: optim.RMSprop(p, lr, momentum=0.5, centered=True),
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adadelta": optim.Adadelta,
    "adamw foreach": lambda p, lr: optim.AdamW(p, lr, foreach=True, amsgrad=True),
}


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())))


def wide() -> nn.Module:
    """The state of its first matrix has as many bytes as that of two others."""
    torch.manual_seed(0)
    sizes = [128, 256, *[128] * 4]
    return nn.Sequential(*(nn.Linear(n, m) for n, m in itertools.pairwise(sizes)))


def states_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def away(optimizer: optim.Optimizer) -> int:
    """How many tensors of state are away now."""
    return sum(len(state.away) for state in optimizer.state.values() if type(state) is ParkedState)


class Trained:
    """A model after two plain steps, whose state is parked from then on."""

    def __init__(self, make: Callable[..., optim.Optimizer] = optim.AdamW, model: Callable[[], nn.Module] = net) -> None:
        self.said: list[str] = []
        self.model = model()
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        for _ in range(2):
            self.backward()
            self.optimizer.step()
        self.tier = DiskTier(8 * MIB)
        nbytes = {p: n for p in self.model.parameters() if (n := sum(parkable(self.optimizer, p)))}
        self.states = ParkedStates(self.optimizer, nbytes, Depot({"disk": self.tier}), "disk", self.said.append)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 128)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.states.park()
        self.states.step_begins()
        self.optimizer.step()
        self.states.step_ended()


def bits_left(trained: Trained) -> list[bytes]:
    """Those of weights and state."""
    return elements([*(p.detach() for p in trained.model.parameters()), *states_of(trained.optimizer)])


def plainly(
    steps: int, make: Callable[..., optim.Optimizer] = optim.AdamW, model: Callable[[], nn.Module] = net
) -> list[bytes]:
    trained = Trained(make, model)
    for _ in range(steps):
        trained.backward()
        trained.optimizer.step()
    trained.states.close()
    return bits_left(trained)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_torch_gives_the_same_bits(kind: str) -> None:
    trained = Trained(KINDS[kind])
    for _ in range(3):
        trained.step()
        assert away(trained.optimizer) >= 4 and type(trained.optimizer.param_groups) is list
    trained.states.close()
    assert bits_left(trained) == plainly(3, KINDS[kind])
    assert not trained.said and not trained.tier.used_nbytes
    assert all(type(state) is dict for state in trained.optimizer.state.values())


def test_a_step_has_one_chunk_on_the_device() -> None:
    """Each matrix is a chunk of its own, and its two moments are all that is there in its update."""
    trained, there = Trained(), []
    read = trained.states._read

    def reading(state: ParkedState, name: Any) -> None:
        read(state, name)
        tensors = (t for s in trained.optimizer.state.values() for t in dict.values(s))
        there.append(sum(t.untyped_storage().nbytes() for t in tensors if t.nbytes >= LEAST_NBYTES))

    trained.states._read = reading  # type: ignore[method-assign]
    trained.step()
    assert max(there) == 2 * 128 * 128 * 4 and len(there) == 8


READERS: dict[str, Callable[[ParkedState], Any]] = {
    "item": lambda s: {name: s[name] for name in s},
    "get": lambda s: {name: s.get(name) for name in s},
    "items": lambda s: dict(s.items()),
    "values": lambda s: dict(zip(s, s.values(), strict=True)),
    "dict": dict,
    "unpacked": lambda s: {**s},
    "copy": lambda s: s.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "or": lambda s: s | {},
    "ror": lambda s: {} | s,
    "setdefault": lambda s: {name: s.setdefault(name, 0) for name in s},
    "pop": lambda s: {name: s.pop(name) for name in tuple(s)},
    "popitem": lambda s: dict(s.popitem() for _ in range(len(s))),
    "repr": lambda s: (repr(s), s.copy())[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_state_that_is_away_gets_it(reader: str) -> None:
    trained = Trained()
    weight = trained.model[0].weight  # type: ignore[index]
    plain = {name: t.clone() for name, t in trained.optimizer.state[weight].items()}
    trained.states.park()
    state = trained.optimizer.state[weight]
    assert type(state) is ParkedState and len(state.away) == 2
    found = READERS[reader](state)
    assert type(found) is dict and elements(found.values()) == elements(plain[name] for name in found) and len(found) == 3
    assert len(trained.said) == 1 and "the loop reads it between updates" in trained.said[0]


def test_state_is_replaced_and_deleted() -> None:
    trained = Trained()
    weight = trained.model[0].weight  # type: ignore[index]
    trained.states.park()
    state = trained.optimizer.state[weight]
    state["exp_avg"] = torch.ones(128, 128)
    del state["exp_avg_sq"]
    state |= {"more": 1}
    state.update(another=2)
    assert not state.away and set(state) == {"step", "exp_avg", "more", "another"} and bool((state["exp_avg"] == 1).all())
    state.clear()
    assert not state and not trained.tier.used_nbytes - 6 * 128 * 128 * 4


def test_checkpoints_have_plain_dicts_that_load_anywhere(tmp_path: Path) -> None:
    trained, plain = Trained(), Trained()
    trained.states.park()
    torch.save(trained.optimizer.state_dict(), tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    own = plain.optimizer.state_dict()
    assert all(type(state) is dict for state in loaded["state"].values())
    for i, state in own["state"].items():
        assert elements(loaded["state"][i].values()) == elements(state.values())
    trained.optimizer.load_state_dict(loaded)  # replaces all state; it is parked again when `loaded` is gone
    del loaded
    torch.manual_seed(1)
    trained.step()
    torch.manual_seed(1)
    plain.backward()
    plain.optimizer.step()
    assert away(trained.optimizer) == 8
    assert elements(states_of(trained.optimizer)) == elements(states_of(plain.optimizer))


def test_what_somebody_holds_stays() -> None:
    """The holder sees each update at once, as without us."""
    trained = Trained()
    view = trained.optimizer.state[trained.model[0].weight]["exp_avg"].view(-1)  # type: ignore[index]
    held_state = trained.optimizer.state_dict()["state"][2]["exp_avg"]
    before = view.clone()
    trained.step()
    assert view.numel() and not torch.equal(view, before) and held_state.sum() is not None
    assert away(trained.optimizer) == 8 - 2 and any("held elsewhere" in line for line in trained.said)


def test_a_dict_that_somebody_holds_stays() -> None:
    trained = Trained()
    held = trained.optimizer.state[trained.model[0].weight]  # type: ignore[index]
    trained.states.park()
    assert type(held) is dict and held["exp_avg"].untyped_storage().nbytes() and away(trained.optimizer) == 6


def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that cannot be written stays on the device, and training goes on."""
    trained = Trained()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trained.tier, "write", full)
    for _ in range(2):
        trained.step()
    assert not away(trained.optimizer) and any("No space left on device" in line for line in trained.said)
    trained.states.close()
    assert bits_left(trained) == plainly(2)


def test_a_read_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a step is raised there, the groups are as before, and no state is lost."""
    trained, failing = Trained(), [True]
    read = trained.tier.read

    def flaky(into: memoryview, offset: int) -> None:
        if failing:
            raise OSError(5, "Input/output error")
        read(into, offset)

    monkeypatch.setattr(trained.tier, "read", flaky)
    plain = Trained()
    trained.states.park()
    trained.backward()
    trained.states.step_begins()
    with pytest.raises(OffloadError, match="Input/output error"):
        trained.optimizer.step()
    assert type(trained.optimizer.param_groups) is list and len(trained.optimizer.param_groups[0]["params"]) == 8
    failing.clear()
    was_away, before = (  # the first chunk, of biases, has been updated
        [t for t in states_of(optimizer) if t.nbytes >= LEAST_NBYTES] for optimizer in (trained.optimizer, plain.optimizer)
    )
    assert len(was_away) == 8 and elements(was_away) == elements(before)


class Interrupt:
    """Interrupts the k-th call."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, original: Callable[..., Any], *args: Any) -> Any:
        self.k -= 1
        if not self.k:
            raise KeyboardInterrupt
        return original(*args)


@pytest.mark.parametrize("model", [net, wide])
def test_an_interrupt_loses_nothing(model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any copy of a step, out or back: all state is there, with the bits of before or of after its update."""
    for k in range(1, 21):
        trained, interrupt = Trained(model=model), Interrupt(k)
        trained.states.park()
        monkeypatch.setattr(trained.states._depot, "store", partial(interrupt, trained.states._depot.store))
        monkeypatch.setattr(state_copies, "bytes_of", partial(interrupt, state_copies.bytes_of))
        with contextlib.suppress(KeyboardInterrupt):
            trained.step()
        monkeypatch.undo()
        trained.states.close()
        found = states_of(trained.optimizer)
        before, after = Trained(model=model), Trained(model=model)
        after.backward()
        after.optimizer.step()
        each = zip(elements(found), elements(states_of(before.optimizer)), elements(states_of(after.optimizer)), strict=True)
        assert all(bits in (one, other) for bits, one, other in each), k


# -- sessions --------------------------------------------------------------------------------------


def trained_by(
    budget: Any, steps: int = 6, make: Any = optim.AdamW, early: bool = False, **options: Any
) -> tuple[Any, list[bytes]]:
    """The status of a run (None without a budget), and the bits that it leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
    optimizer = make(model.parameters(), lr=1e-3)
    options = dict(offload="disk", max_slowdown=1e6, optimizer_in_backward="always" if early else "never") | options
    status = None
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, budget=budget, **options) as run:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(128, 256)).square().mean()
            with run.last_backward() if isinstance(run, Run) and early else contextlib.nullcontext():
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if not early else None
            optimizer.step()
        status = run.status() if isinstance(run, Run) else None
    return status, elements([*(p.detach() for p in model.parameters()), *states_of(optimizer)])


def adamw(params: Any, lr: float) -> optim.Optimizer:
    return optim.AdamW(params, lr=lr, foreach=True)


CASES: dict[str, tuple[Any, bool]] = {
    "one by one": (optim.AdamW, False),
    "foreach": (adamw, False),
    "early": (optim.AdamW, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_that_only_parked_state_keeps(case: str) -> None:
    """Bits are the plain ones, the measured peak is within the budget, and as predicted, to 4 KiB."""
    make, early = CASES[case]
    with listening() as said:
        least, _ = trained_by("min", make=make, early=early, offload="none")
        budget = least.plan.budget_nbytes - MIB
        with pytest.raises(InfeasibleError):
            trained_by(budget, make=make, early=early, offload="none")
        status, bits = trained_by(budget, make=make, early=early)
        text = said.taken()
    _, plain = trained_by(None, make=make, early=early)
    assert bits == plain
    plan: Plan = status.plan
    assert plan.states and "parked between updates: the optimizer state of" in text
    assert status.measured_peak_nbytes <= budget
    assert abs(status.measured_peak_nbytes - status.predicted_peak_nbytes) <= 4096
    assert plan.predicted.moved_nbytes >= 2 * sum(state.nbytes for state in plan.states)
    assert plan.lower_bound_seconds <= plan.predicted.seconds


def test_the_smallest_plan_parks_all_state() -> None:
    """3 MiB of moments are away: the smallest plan needs them no more, but for a chunk."""
    without, _ = trained_by("min", early=True, offload="none")
    status, bits = trained_by("min", early=True)
    assert bits == trained_by(None, early=True)[1]
    assert len(status.plan.states) == 6 and sum(state.nbytes for state in status.plan.states) == 3 * MIB
    assert without.plan.budget_nbytes - status.plan.budget_nbytes >= 2 * MIB
    assert status.measured_peak_nbytes <= status.plan.budget_nbytes


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("solver_seconds", [30.0, 1e-9])
def test_the_number_of_the_smallest_plan_can_be_set(solver_seconds: float, early: bool) -> None:
    """It is not refused before the first update, though the batch is freed only then, and however little time solvers have."""
    least, _ = trained_by("min", early=early)
    budget = least.plan.budget_nbytes
    status, _ = trained_by(budget, early=early, solver_seconds=solver_seconds)
    assert status.plan.states and status.measured_peak_nbytes <= budget == status.plan.budget_nbytes


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
        self.critic = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))

    def forward(self, noise: Tensor, critic_learns: bool) -> Tensor:
        made = self.generator(noise)
        return self.critic(made.detach() if critic_learns else made)


def test_each_of_two_optimizers_has_its_chunks() -> None:
    """A step of the critic and one of the generator: in both updates a chunk of state is there, also in the one which is not
    the last of the step.
    """
    torch.manual_seed(0)
    model = Gan()
    critic, generator = (optim.AdamW(part.parameters(), lr=1e-3) for part in (model.critic, model.generator))
    options = dict(offload="disk", max_slowdown=1e6, optimizer_in_backward="never")
    with optimize(model, [critic, generator], budget="min", **options) as run:
        for _ in range(6):
            for optimizer in (critic, generator):
                optimizer.zero_grad()
                model(torch.randn(64, 256), optimizer is critic).square().mean().backward()
                optimizer.step()
        status = run.status()
    parked = ["state"] * 12 + ["gradient"] * 6 * HAS_NATIVE
    assert status.plan is not None and [state.what for state in status.plan.states] == parked
    assert 0 <= status.predicted_peak_nbytes - status.measured_peak_nbytes <= 8192  # of any optimizer, the largest chunk


def test_nothing_is_parked_where_the_step_fits() -> None:
    status, _ = trained_by(64 * MIB)
    assert not status.plan.states


def test_no_more_is_parked_than_the_budget_needs() -> None:
    """Copies take time: with room for a part of state and gradients, a part of them stays."""
    most, _ = trained_by("min")
    status, bits = trained_by(most.plan.budget_nbytes + 2 * MIB)
    assert 0 < len(status.plan.states) < len(most.plan.states) == (8 + 4 if HAS_NATIVE else 6) and bits == trained_by(None)[1]


def test_little_more_is_moved_than_the_budget_is_missed_by() -> None:
    """Out and back, and at most what the update of a matrix reads more, which is on the device then. A quarter of what rests is
    more than that.
    """
    matrix_nbytes = 256 * 256 * 4
    least, most = (trained_by("min", offload=offload)[0].plan.budget_nbytes for offload in ("disk", "none"))
    for part in (2, 5, 8):
        budget = least + part * (most - least) // 10
        status, _ = trained_by(budget)
        moved = sum(2 * state.nbytes for state in status.plan.states)
        assert status.measured_peak_nbytes <= budget and 0 < moved <= 2 * (most - budget + 4 * matrix_nbytes)


def test_an_optimizer_that_may_do_more_than_torchs_keeps_its_state() -> None:
    class Mine(optim.AdamW):
        pass

    with listening() as said:
        status, bits = trained_by("min", make=Mine)
        text = said.taken()
    assert not status.plan.states and "optimizer state is not parked: Mine is not known to update" in text
    assert bits == trained_by(None, make=Mine)[1]


def test_a_plan_file_parks_state(tmp_path: Path) -> None:
    path, kept = tmp_path / "plan.json", []
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def loop(run: Run, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(512, 128)).square().mean().backward()
            optimizer.step()
            kept.append(away(optimizer))

    with optimize(model, optimizer, budget="min", offload="disk", max_slowdown=1e6) as run:
        loop(run, 5)
        plan, graph = run.session.plan, run.session._plan_cache.main.program.graph  # type: ignore[attr-defined]
        write_plan(path, plan, graph)
    read, _ = read_plan(path)
    assert read.states == plan.states and read.states
    for fresh in (False, True):  # state that the first planned update makes is parked, too
        kept.clear()
        optimizer.state.clear() if fresh else None
        with optimize(model, optimizer, plan=path, offload="disk") as run:
            loop(run, 2)
        assert kept == [2 * sum(state.what == "state" for state in plan.states)] * 2


def test_a_disk_that_fails_at_the_end_leaves_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that cannot be read is named; the model can be trained in another run."""
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def loop() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(512, 128)).square().mean().backward()
            optimizer.step()

    def failing(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OffloadError, match="Input/output error"), monkeypatch.context() as patched:
        with optimize(model, optimizer, budget="min", offload="disk", max_slowdown=1e6):
            loop()
            patched.setattr(DiskTier, "read", failing)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with optimize(model, optimizer, budget="min") as run:
        loop()
        assert run.plan is not None
