"""Budgets of tiers: kept by plans and by what is really taken, shown, and enough where an error says so."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.cuda import Cuda
from lightning_memopt.errors import BudgetError, ConfigError, InfeasibleError, PlanFileError, TierFullError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.integrations.to_device import to_device
from lightning_memopt.plan import Life, Plan, Prediction, plan_from_json, read_plan
from lightning_memopt.record import beneath_calls
from lightning_memopt.report.explain import explain
from lightning_memopt.runtime.tiers import HostTier, room
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.parked_states import StatesAtRest
from lightning_memopt.session.parking import offloading
from lightning_memopt.session.parking.depots import Depots
from lightning_memopt.session.parking.offloading import Offloading
from tests.cpu.lib.engines import elements, needs_native
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given

MIB = 1 << 20
PARKING = dict(budget="min", offload="disk", max_slowdown=1e6)


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The most bytes that the disk tiers of this process had at one time."""
    most = [0]
    init = room.Room.__init__

    def watched(self: room.Room, name: str, nbytes: int, limit_nbytes: int | None = None) -> None:
        init(self, name, nbytes, limit_nbytes)
        most[0] = max(most[0], room.taken_nbytes("disk"))

    monkeypatch.setattr(room.Room, "__init__", watched)
    assert room.taken_nbytes("disk") == 0
    yield most
    assert room.taken_nbytes("disk") == 0


@pytest.fixture
def gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what else is parked."""
    monkeypatch.setattr(StatesAtRest, "_parameters", lambda self: iter(()))


def let_go() -> None:
    """Of models of earlier runs, also of those that `to_device` has parked."""
    gc.collect()
    with beneath_calls({}, print):
        gc.collect()


def net(depth: int = 8, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-3)


class Trained:
    """A run of a few steps: what it said, its status, the plans of its batches, bits of its weights and state. What a program
    holds counts, so the model is let go of.
    """

    def __init__(
        self,
        make: Callable[[Any], optim.Optimizer] = sgd,
        model: Callable[[], nn.Module] = net,
        sizes: tuple[int, ...] = (512,) * 6,
        **options: Any,
    ) -> None:
        let_go()
        net = model()
        optimizer = make(p for p in net.parameters() if p.requires_grad)
        with listening() as said, optimize(net, optimizer, **options) if options else contextlib.nullcontext() as run:
            for i, size in enumerate(sizes):
                torch.manual_seed(i)
                optimizer.zero_grad()
                net(torch.randn(size, 256)).square().mean().backward()
                optimizer.step()
            if run is not None:
                self.status, self.taken_nbytes = run.status(), room.taken_nbytes("disk")
                self.plans = [state.plan for state in run.session._plan_cache.values() if isinstance(state, Running)]
                self.deviated = any(s.drift.deviated for s in run.session._plan_cache.values() if isinstance(s, Running))
        self.report = "" if run is None else run.report()
        self.said = said.taken()
        state = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
        self.bits = elements([*(p.detach() for p in net.parameters()), *state])

    @property
    def plan(self) -> Plan:
        assert self.status.plan is not None
        return self.status.plan


# -- saved tensors -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("gradients_stay")
def test_saved_tensors_keep_the_budget_of_the_tier(taken: list[int]) -> None:
    """A smaller budget means that less is parked, and more is needed on the device; results are the same bits."""
    plain = Trained().bits
    full = Trained(recompute=False, **PARKING)
    wanted = full.plan.in_tiers["disk"]
    assert taken == [wanted] and dict(full.plan.tier_limits)["disk"] > wanted
    needed = [full.plan.budget_nbytes]
    for share in (0.75, 0.5, 0.25, 0.05):
        limit, taken[0] = int(share * wanted), 0
        trained = Trained(recompute=False, disk_budget=limit, **PARKING)
        there = trained.plan.in_tiers.get("disk", 0)
        assert taken == [there] and there <= limit < there + MIB // 2
        assert dict(trained.plan.tier_limits) == {"disk": limit}
        assert trained.status.measured_peak_nbytes == trained.plan.predicted.peak_nbytes
        assert trained.bits == plain
        needed.append(trained.plan.budget_nbytes)
    assert needed == sorted(needed) and needed[-1] > needed[0] + 2 * MIB, "less in the tier, more on the device"


def test_the_budget_is_shown_beside_what_is_taken() -> None:
    trained = Trained(recompute=False, disk_budget="2MiB", **PARKING)
    (line,) = (line for line in trained.said.splitlines() if "plan in force" in line)
    assert line.endswith("; 2.00 MiB of 2.00 MiB in the disk tier")
    assert "2.00 MiB of 2.00 MiB in the disk tier" in trained.report


def refused(**options: Any) -> tuple[str, dict[str, int], int]:
    """What the error says: its text, and the budgets that are enough."""
    try:
        Trained(**options)
    except InfeasibleError as error:
        assert error.smallest_nbytes is not None
        return str(error), error.tiers, error.smallest_nbytes  # not the error, whose frames hold the model
    raise AssertionError("no error")


def test_rebuilding_takes_the_place_of_what_the_tier_has_no_room_for(taken: list[int]) -> None:
    """The same budget of the device: the less of the tier, the more time, and the bound follows."""
    plain, seconds, bounds = Trained().bits, [], []
    for limit in (16 * MIB, MIB, MIB // 4, 1 << 14):
        taken[0] = 0
        trained = Trained(budget=7 * MIB, disk_budget=limit, offload="disk", on_exceed="raise")
        assert taken[0] <= limit and trained.bits == plain
        assert trained.status.measured_peak_nbytes <= trained.plan.predicted.peak_nbytes <= 7 * MIB
        seconds.append(trained.plan.predicted.seconds)
        bounds.append(trained.plan.lower_bound_seconds)
        assert bounds[-1] <= seconds[-1]
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0] and bounds[-1] > bounds[0]


@pytest.mark.usefixtures("gradients_stay")
def test_the_budgets_that_an_error_names_are_enough(taken: list[int]) -> None:
    """That of the device with this one of the tier, and that of the tier with this one of the device."""
    free = Trained(recompute=False, **PARKING)
    asked = dict(offload="disk", recompute=False, on_exceed="raise", profile_steps=1)
    budget = free.plan.budget_nbytes + MIB
    text, tiers, smallest = refused(budget=budget, disk_budget="64KiB", **asked)
    assert set(tiers) == {"disk"} and f"disk_budget={tiers['disk']} or more" in text and smallest > budget
    for found in (
        Trained(budget=budget, disk_budget=tiers["disk"], **asked),
        Trained(budget=smallest, disk_budget="64KiB", **asked),
    ):
        limit = dict(found.plan.tier_limits)["disk"]
        assert found.plan.in_tiers.get("disk", 0) <= limit
        assert found.status.measured_peak_nbytes <= found.plan.predicted.peak_nbytes <= found.plan.budget_nbytes
    refused(budget=budget, disk_budget=tiers["disk"] - 1, **asked)


def test_no_budget_of_a_tier_helps_where_none_is_short() -> None:
    text, tiers, _ = refused(budget=3 * MIB, offload="disk", disk_budget="1GiB", on_exceed="raise")
    assert not tiers and "disk_budget" not in text


@pytest.mark.usefixtures("gradients_stay")
def test_batches_of_several_sizes_take_turns_in_the_tier(taken: list[int]) -> None:
    """Each has a plan of its own, and there is room for the tensors of one at a time."""
    sizes = (256, 256, 256, 512, 512, 512, *(256, 512) * 4)
    plain = Trained(sizes=sizes).bits
    options = dict(recompute=False, profile_steps=1, **PARKING)
    free = Trained(sizes=sizes, **options)
    each = [plan.in_tiers["disk"] for plan in free.plans]
    shared = sum(unit.tier_nbytes for unit in free.plans[0].weights)
    assert len(each) == 2 and taken == [sum(each) - shared]
    taken[0], limit = 0, max(each)
    trained = Trained(sizes=sizes, disk_budget=limit, **options)
    assert taken[0] <= limit and trained.bits == plain and not trained.deviated
    assert [plan.in_tiers["disk"] for plan in trained.plans] == each


def test_a_forward_too_many_stays_on_the_device(taken: list[int]) -> None:
    """A second forward begins before the backward of the first one, and the tier has room for one: a warning says it."""

    def steps(options: dict[str, Any] | None) -> tuple[list[bytes], Run | None]:
        model = net()
        optimizer = sgd(model.parameters())

        def step(i: int, twice: bool) -> None:
            torch.manual_seed(i)
            optimizer.zero_grad()
            forwards = [model(torch.randn(512, 256)).square().mean() for _ in range(1 + twice)]
            for loss in forwards:
                loss.backward()
            optimizer.step()

        if options is None:
            for i in range(6):
                step(i, i > 3)
            return elements(p.detach() for p in model.parameters()), None
        with optimize(model, optimizer, **options) as run:
            for i in range(6):
                step(i, i > 3)
        return elements(p.detach() for p in model.parameters()), run

    wanted = Trained(recompute=False, **PARKING).plan.in_tiers["disk"]
    taken[0] = 0
    with pytest.warns(UserWarning, match="the tier has no room for .* that the plan parks"):
        bits, _ = steps(dict(recompute=False, disk_budget=wanted, **PARKING))
    assert taken == [wanted] and bits == steps(None)[0]


# -- what rests --------------------------------------------------------------------------------------


def lora() -> nn.Module:
    """Frozen layers with a trained one at the end."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(256, 256), *blocks, nn.Linear(256, 256))
    for block in blocks:
        block.requires_grad_(False)
    return model


RESTING: dict[str, tuple[Callable[[Any], optim.Optimizer], Callable[[], nn.Module]]] = {
    "state": (adam, net),
    "frozen weights": (sgd, lora),
    "both": (adam, lora),
}
KINDS = "state", pytest.param("frozen weights", marks=needs_native), "both"


@pytest.mark.parametrize("kind", KINDS)
def test_what_rests_and_what_is_saved_keep_one_budget(kind: str, taken: list[int]) -> None:
    make, model = RESTING[kind]
    plain = Trained(make, model).bits
    free = Trained(make, model, **PARKING)
    wanted = free.plan.in_tiers["disk"]
    rests = sum(each.tier_nbytes for each in (*free.plan.states, *free.plan.weights))
    assert rests >= MIB and taken[0] >= rests
    budgets = [free.plan.budget_nbytes]
    for share in (0.8, 0.4, 0.1):
        limit, taken[0] = int(share * wanted), 0
        trained = Trained(make, model, disk_budget=limit, **PARKING)
        assert trained.plan.in_tiers.get("disk", 0) <= limit and taken[0] <= limit
        assert dict(trained.plan.tier_limits) == {"disk": limit}
        assert trained.bits == plain and not trained.deviated
        assert trained.status.measured_peak_nbytes <= trained.plan.predicted.peak_nbytes
        budgets.append(trained.plan.budget_nbytes)
    assert budgets == sorted(budgets) and budgets[-1] > budgets[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_budgets_that_an_error_names_are_enough_for_what_rests(kind: str, taken: list[int]) -> None:
    make, model = RESTING[kind]
    asked: dict[str, Any] = dict(make=make, model=model, offload="disk", on_exceed="raise", profile_steps=1)
    free = Trained(make, model, **PARKING)
    budget = free.plan.budget_nbytes + MIB // 4
    text, tiers, smallest = refused(budget=budget, disk_budget="256KiB", **asked)
    assert set(tiers) == {"disk"} and f"disk_budget={tiers['disk']} or more" in text and smallest > budget
    for options in (dict(budget=budget, disk_budget=tiers["disk"]), dict(budget=smallest, disk_budget="256KiB")):
        taken[0] = 0
        found = Trained(**asked, **options)
        limit = dict(found.plan.tier_limits)["disk"]
        assert found.plan.in_tiers.get("disk", 0) <= limit and taken[0] <= limit
        assert found.status.measured_peak_nbytes <= found.plan.budget_nbytes == options["budget"]


@needs_native
@pytest.mark.usefixtures("gradients_stay")
def test_weights_that_were_never_on_the_device_count(taken: list[int]) -> None:
    """`to_device` has parked them before the run. What the budget does not hold comes home."""
    plain = Trained(model=lora).bits
    placed_nbytes = 6 * (256 * 256 * 4 + 4096)
    for limit in (2 * placed_nbytes, placed_nbytes // 2):
        trained = Trained(model=lambda: to_device(lora(), "cpu"), disk_budget=limit, recompute=False, **PARKING)
        assert taken[0] >= placed_nbytes and trained.bits == plain
        assert 0 < trained.taken_nbytes == trained.plan.in_tiers["disk"] <= limit
        in_tier = sum(unit.tier_nbytes for unit in trained.plan.weights)  # also of the two trained layers
        assert (in_tier == placed_nbytes // 6 * 8) is (limit > placed_nbytes)
        let_go()


def test_runs_in_one_process_share_the_budget(taken: list[int]) -> None:
    """The budget is of the process: a second run gets what the first one leaves."""
    first = net()
    options = dict(PARKING, recompute=False, profile_steps=1)
    wanted = Trained(recompute=False, **PARKING).plan.in_tiers["disk"]
    limit, taken[0] = wanted * 3 // 2, 0
    optimizer = sgd(first.parameters())
    with optimize(first, optimizer, **options) as run:
        for _ in range(4):
            optimizer.zero_grad()
            first(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
        assert run.plan is not None and run.plan.in_tiers["disk"] == wanted == room.taken_nbytes("disk")
        second = Trained(disk_budget=limit, **options)
    assert second.plan.in_tiers["disk"] <= limit - wanted < wanted and taken[0] <= limit and not second.deviated


# -- what is given, and what the machine has ---------------------------------------------------------


def test_without_a_budget_the_machine_is_asked_when_a_plan_is_made(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    """Nine tenths of what is left; a budget above that is lowered to what is left."""
    wanted = Trained(recompute=False, **PARKING).plan.in_tiers["disk"]
    monkeypatch.setattr(offloading, "left_nbytes", lambda name, directory: wanted)
    for budget, limit in ((None, wanted * 9 // 10), (4 * wanted, wanted), (wanted // 2, wanted // 2)):
        taken[0] = 0
        trained = Trained(recompute=False, disk_budget=budget, **PARKING)
        assert dict(trained.plan.tier_limits) == {"disk": limit} and taken[0] <= limit


def test_a_share_is_one_of_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def total(name: str, directory: str | None) -> int:
        asked.append((name, directory))
        return 4 * MIB

    monkeypatch.setattr(offloading, "total_nbytes", total)
    trained = Trained(recompute=False, disk_budget="50%", **PARKING | {"offload": f"disk:{tmp_path}"})
    assert dict(trained.plan.tier_limits) == {"disk": 2 * MIB} and set(asked) == {("disk", str(tmp_path))}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"disk_budget": "much", "offload": "disk"}, BudgetError, "disk_budget 'much' is not a size"),
        ({"disk_budget": 0, "offload": "disk"}, BudgetError, "disk_budget 0 is not positive"),
        ({"disk_budget": 2.5, "offload": "disk"}, BudgetError, "a share above 1 of the disk"),
        ({"disk_budget": True, "offload": "disk"}, BudgetError, "disk_budget True is a bool"),
        ({"disk_budget": "min", "offload": "disk"}, BudgetError, "disk_budget 'min' has no bytes"),
        ({"disk_budget": 1 << 61, "offload": "disk"}, BudgetError, "above the disk's"),
        ({"disk_budget": 4096, "offload": "disk"}, BudgetError, "to measure copies alone takes"),
        ({"disk_budget": "1GiB"}, ConfigError, "limits what is parked in the disk tier, and offload is 'none'"),
        ({"host_budget": "1GiB", "offload": "disk"}, ConfigError, "Set offload='host', or leave host_budget out"),
        ({"disk_budget": "1GiB", "offload": "auto"}, ConfigError, "Set offload='disk', or leave disk_budget out"),
    ],
)
def test_what_is_refused_before_anything_runs(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = net()
    with pytest.raises(error, match=words), optimize(model, sgd(model.parameters()), budget="min", **options):
        pass


def test_a_device_that_computes_in_the_hosts_memory_offloads_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, said = torch.device("cuda", 0), list[str]()
    monkeypatch.setattr(offloading, "is_here", lambda device: True)
    for shares, tier in ((False, "host"), (True, "")):
        monkeypatch.setattr(Cuda, "shares_memory", shares)
        found = Offloading(cuda, MemOptConfig(offload="auto"))
        assert found.tier == tier
        found.check(said.append)
    assert len(said) == 1 and "cuda:0 computes in the host's memory" in said[0]
    with pytest.raises(ConfigError, match="on cuda:0, which computes in it, use 'disk'"):
        Offloading(cuda, MemOptConfig(offload="host"))
    assert Offloading(cuda, MemOptConfig(offload="disk")).tier == "disk"


def test_the_host_tier_keeps_its_limit() -> None:
    """With all that this process has there, until it is given back."""
    cpu = torch.device("cpu")
    first = HostTier(3 * MIB, cpu, limit_nbytes=4 * MIB)
    assert room.taken_nbytes("host") == 3 * MIB
    with pytest.raises(TierFullError, match="3.00 MiB of at most 4.00 MiB.*set a larger host_budget"):
        HostTier(2 * MIB, cpu, limit_nbytes=4 * MIB)
    second = HostTier(MIB, cpu, limit_nbytes=4 * MIB)
    first.close()
    first.close()
    assert room.taken_nbytes("host") == MIB
    del second
    gc.collect()
    assert room.taken_nbytes("host") == 0


def test_depots_of_the_host_take_turns() -> None:
    """What is idle is taken over, or closed for a larger one; what has tensors stays."""
    depots = Depots(torch.device("cpu"), None)
    depots.limit_nbytes = 4 * MIB
    plans = [fake_plan(nbytes) for nbytes in (3 * MIB, 2 * MIB, 4 * MIB)]
    large = depots.of(plans[0])
    assert large is not None and large.capacity_nbytes("host") == 3 * MIB
    small = depots.of(plans[1])
    assert small is not None and small.capacity_nbytes("host") == 3 * MIB and not large.tiers, "taken over"
    stored = small.store("host", torch.zeros(MIB, dtype=torch.uint8), "a tensor")
    again = depots.of(plans[0])
    assert again is large and room.taken_nbytes("host") == 4 * MIB and large.capacity_nbytes("host") == MIB, "what is left"
    stored.release()
    whole = depots.of(plans[2])
    assert whole is not None and whole.capacity_nbytes("host") == 4 * MIB == room.taken_nbytes("host"), "the others closed"
    depots.close()
    assert room.taken_nbytes("host") == 0


def fake_plan(nbytes: int) -> Plan:
    """A plan that parks one tensor of so many bytes."""
    life = Life(tensor=0, born_at=1, freed_at=2, how="fetch", form="host", parked_nbytes=nbytes)
    predicted = Prediction(peak_nbytes=0, extra_seconds=0.0, extra_flops=0, rebuilt_nbytes=0, rebuilt_ops=0)
    return Plan(fingerprint="", lives=(life,), solver="", budget_nbytes=0, predicted=predicted, unmodified_peak_nbytes=0)


def test_a_saved_plan_says_what_it_takes_and_a_smaller_budget_refuses_it(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    path = tmp_path / "plan.json"
    with optimize(model, optimizer, recompute=False, disk_budget="2MiB", **PARKING) as run:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
        run.save_plan(path)
    fields = json.loads(path.read_text())["plan"]
    assert fields["tiers"] == [{"tier": "disk", "nbytes": 2 * MIB, "limit_nbytes": 2 * MIB}]
    plan, graph = read_plan(path)
    assert plan.in_tiers == dict(plan.tier_limits) == {"disk": 2 * MIB}
    assert "2.00 MiB of 2.00 MiB in the disk tier" in explain(plan, graph)
    fields["tiers"][0]["limit_nbytes"] -= 1
    with pytest.raises(PlanFileError, match="2097152 bytes are parked in the disk tier, and 2097151 is the limit"):
        plan_from_json(json.loads(path.read_text()) | {"plan": fields})
    with_it: dict[str, Any] = dict(plan=path, offload="disk", budget="auto")
    with pytest.raises(InfeasibleError, match="takes 2097152 bytes in the disk tier, above disk_budget='1MiB'"):
        optimize(model, optimizer, disk_budget="1MiB", **with_it).__enter__()
    with optimize(model, optimizer, disk_budget="2MiB", **with_it):
        optimizer.zero_grad()
        model(torch.randn(512, 256)).square().mean().backward()
        assert room.taken_nbytes("disk") == 2 * MIB
