"""`offload=` and `compress=` in a session: budgets that recomputation alone cannot keep, same bits, files gone, a table."""

from __future__ import annotations

import contextlib
import gc
import math
import resource
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError, InfeasibleError, OffloadError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import Machine
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.rates import Coding, Link, MachineRates
from lightning_memopt.report.explain import tensors
from lightning_memopt.report.fates import kept
from lightning_memopt.report.table import parked_text
from lightning_memopt.session.cache import plan_cache
from lightning_memopt.session.cache.solves import Solves
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.parking import offloading as offloading_module
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.solving import frontier_of
from lightning_memopt.trace import link
from tests.cpu.lib.counting import Counting
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, assert_same, batches, counted_nbytes, loss_of, sgd, small, state, train
from tests.cpu.lib.observed_graph import graph_of
from tests.cpu.lib.stepped import Stepped, same
from tests.cpu.lib.times import Known, given


def trained(model: nn.Module, count: int = 6, **options: Any) -> tuple[Run, dict[str, torch.Tensor], list[torch.Tensor]]:
    o = sgd(model)
    with optimize(model, o, **(QUIET | options)) as run:
        losses = train(model, o, batches(count, size=96))
        run.text = run.report()  # type: ignore[attr-defined]
    return run, state(model), losses


def plain(model: nn.Module, count: int = 6) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    losses = train(model, sgd(model), batches(count, size=96))
    return state(model), losses


def wide() -> nn.Module:
    return small(width=64, depth=6)


@pytest.fixture(scope="module")
def smallest() -> int:
    """The least that recomputation alone needs beside what the process holds."""
    held = counted_nbytes()
    run, _, _ = trained(wide(), budget="min", max_slowdown=math.inf)
    assert run.plan is not None
    return run.plan.predicted_peak_nbytes - held


def test_tiers_of_plans_that_are_no_longer_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, and with them files and threads: else a run with batches of ever other sizes would fill the disk. Not while a
    graph that was retained still has something there.
    """
    monkeypatch.setattr(plan_cache, "PLANS", 2)
    monkeypatch.setattr(plan_cache, "_STEPS_A_PLAN", 1)
    monkeypatch.setattr(Solves, "allows", lambda *_: True)
    model = small(width=64, depth=6)
    o = sgd(model)
    with optimize(model, o, **(QUIET | {"budget": "min", "offload": "disk", "profile_steps": 1})) as run:
        train(model, o, batches(2, size=32))
        held = loss_of(model, batches(1, size=32)[0])
        for size in (80, 200, 500):  # each too large to borrow the plan before it
            train(model, o, batches(2, size=size))
        depots = run.session._offloading.depots._of_plan.values()
        assert [bool(depot.used_nbytes) for _, depot in depots if depot] == [True, False, False]
        del held
        train(model, o, batches(2, size=1250))
        assert len(run.session._offloading.depots._of_plan) == 2


def test_two_forwards_before_one_backward() -> None:
    """EXACT: tiers have room for one forward; the second one finds more, instead of ending training."""
    ends = []
    for options in (None, {"budget": "min", "offload": "disk", "profile_steps": 1}):
        model = small(width=64, depth=6)
        o = sgd(model)
        with optimize(model, o, **(QUIET | options)) if options else contextlib.nullcontext() as run:
            train(model, o, batches(2, size=64))
            torch.manual_seed(5)
            losses = [loss_of(model, batch) for batch in batches(3, size=64)]
            if run is not None:
                (_, depot), *_ = run.session._offloading.depots._of_plan.values()
                assert depot is not None and depot.used_nbytes == 3 * depot.tiers["disk"].capacity_nbytes
            sum(losses).backward()  # type: ignore[union-attr]
            o.step()
        ends.append(state(model))
    assert_same(*ends)


def test_below_what_recomputation_can_do(smallest: int) -> None:
    """A budget below the smallest plan of recomputation alone: refused without offload, kept and bit-equal with it."""
    expected, losses = plain(wide())
    budget = int(0.9 * smallest) + counted_nbytes()
    with pytest.raises(InfeasibleError):
        trained(wide(), budget=budget)
    run, found, ours = trained(wide(), budget=budget, offload="disk", verify=True)
    assert_same(expected, found)
    assert all(torch.equal(a, b) for a, b in zip(losses, ours, strict=True))
    main = state_of(run)
    assert isinstance(main, Running) and run.plan is not None
    assert {tier_of(life.form) for life in run.plan.lives if life.how == "fetch"} == {"disk"}
    assert main.peaks.measured_nbytes is not None and main.peaks.measured_nbytes <= budget
    assert abs(main.peaks.measured_nbytes / run.plan.predicted_peak_nbytes - 1) <= 0.01
    moved = run.plan.predicted.moved_nbytes
    assert moved > 0 and "moved" in run.text  # type: ignore[attr-defined]
    assert main.depot is not None and (main.depot.forwards, main.depot.timed) == (4, 4)
    away = {life.tensor for life in run.plan.lives if life.how == "fetch"}
    assert sum(count for _, count, _ in kept(main.program.graph, run.plan)) + len(away) <= len(main.program.graph.saves_of)
    assert "fetch from disk" in tensors(run.plan, main.program.graph)
    text = parked_text(run.plan, run.session.transfers())  # as Lightning shows it: the session is over
    assert "not measured" not in text and moved == main.depot.moved_nbytes // 4


def test_copies_that_are_measured_take_no_more_than_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come after its update, where a budget is in force already."""

    class Measured(Known):
        def of_transfers(self, measure: Any) -> MachineRates:
            return measure()  # type: ignore[no-any-return]

    given(monkeypatch, Measured())
    taken: list[int] = []
    ones, zeros = torch.ones, torch.zeros

    def counted(make: Any) -> Any:
        return lambda *args, **options: (made := make(*args, **options), taken.append(made.nbytes))[0]

    monkeypatch.setattr(link.torch, "ones", counted(ones))
    monkeypatch.setattr(link.torch, "zeros", counted(zeros))
    run, _, _ = trained(wide(), budget="min", offload="disk", max_slowdown=math.inf)
    assert run.plan is not None and len(taken) >= 6
    most = max(a + b for a, b in zip(taken[::2], taken[1::2], strict=True))
    assert 1 << 16 < most < run.plan.unmodified_peak_nbytes


def test_on_a_gpu_too_the_smallest_plan_parks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a device the budget is compared with reserved bytes, which must be computed for each plan."""

    class WithHost(Known):
        def of_transfers(self, measure: Any) -> MachineRates:
            return MachineRates(name="given", links={"host": Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)})

    given(monkeypatch, WithHost())
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x = torch.randn(4096, 256)
    graph = graph_of(model, (x,), lambda: model(x).sum())
    graph = replace(graph, device="cuda", ops=tuple(replace(op, recomputable=False) for op in graph.ops))
    offloading = Offloading(torch.device("cuda"), MemOptConfig(offload="host", verbose=False))
    alone = frontier_of(graph, Offloading(torch.device("cuda"), MemOptConfig(verbose=False)), lambda _: None, Machine())
    together = frontier_of(graph, offloading, lambda _: None, Machine())
    assert together.smallest_nbytes < alone.smallest_nbytes
    plan = together.smallest_plan()
    assert plan.parks and plan.predicted.reserved_nbytes <= plan.budget_nbytes == together.smallest_nbytes


def test_never_slower_than_recomputation_alone(smallest: int) -> None:
    """Where both fit, the plan is the one predicted to be faster."""
    budget = int(1.3 * smallest) + counted_nbytes()
    alone, _, _ = trained(wide(), budget=budget)
    offloading, _, _ = trained(wide(), budget=budget, offload="disk")
    assert alone.plan is not None and offloading.plan is not None
    frontier = offloading.session.status().frontier
    assert frontier is not None
    assert offloading.plan.predicted.seconds <= frontier.within(budget).predicted.seconds + 1e-9


class Rectified(nn.Module):
    """Convolutions, batch norm, ReLU and pooling: maps of which only the sign is read back.

    All are of one size: they outweigh the workspace of a convolution, which differs between machines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                m
                for n in (1, 8, 8)
                for m in (nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 1, 1))
            )
        )
        self.head = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 1, 32, 32, generator=g), torch.randint(0, 24, (16,), generator=g)) for _ in range(count)]


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


FAST = Coding(encode_bytes_per_second=1e12, decode_bytes_per_second=1e12)


def test_masks_at_one_bit_are_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU's maps take one bit per value if only their sign is read: bit-equal, within the budget, as predicted."""
    monkeypatch.setattr(Offloading, "rates", MachineRates(name="fast", codecs={"positive": FAST}))
    torch.manual_seed(0)
    model, twin = Rectified(), Rectified()
    twin.load_state_dict(model.state_dict())
    losses = train(twin, sgd(twin), images(6), classified)
    o = sgd(model)
    with optimize(model, o, budget="min", recompute=False, compress="lossless", **QUIET) as run:
        found = train(model, o, images(6), classified)
        main = state_of(run)
    assert isinstance(main, Running) and main.peaks.measured_nbytes is not None
    assert_same(state(twin), state(model))
    assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True))
    assert {codec_of(life.form) for life in main.plan.lives if life.how == "fetch"} == {"positive"}
    assert abs(main.peaks.measured_nbytes / main.plan.predicted_peak_nbytes - 1) <= 0.01


def test_a_threshold_may_be_any_number() -> None:
    """`threshold` and ReLU share a backward op. A tensor that both read cannot be kept as signs only."""
    torch.manual_seed(0)
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), torch.randn(64, 64)

    def loss() -> torch.Tensor:
        h = x
        for i, layer in enumerate(layers):
            h = layer(h).relu()
            h = nn.functional.threshold(h, 0.5, 0.0) if i else h + 1
        return h.square().sum()

    one = Stepped(layers, loss)
    forms = Offloading(one.device, MemOptConfig(budget="min", compress="lossless")).forms(one.graph)
    program = one.away(form="positive", only=lambda t: bool(forms.get(t)))
    assert same(one.step(), one.step(program)) and len(program.parked) == 1, "that of the first layer, which no threshold reads"


@torch.library.custom_op("memopt_hybrid::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An op that is not declared safe to run again."""
    return x * 2


twice.register_autograd(lambda ctx, grad: grad * 2)


class Gates(nn.Module):
    """ReLUs between ops that cannot run again: what is saved is parked, or stays."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.first, self.last = nn.Linear(16, 512), nn.Linear(512, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(6):
            h = torch.relu(twice(h) - 0.1)
        if self.wide:  # most is needed here, when nothing is on its way
            h = torch.cat([h, h, h], 1)
        return self.last(twice(h)[:, :512])


def test_compressed_and_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the link is slow and codecs are not, signs go to the disk at one bit: bit-equal, in the budget, as predicted."""
    slow = Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    monkeypatch.setattr(Offloading, "rates", MachineRates(name="slow", links={"disk": slow}, codecs={"positive": FAST}))
    torch.manual_seed(0)
    model, twin = Gates(wide=True), Gates(wide=True)
    twin.load_state_dict(model.state_dict())
    data = [(torch.randn(256, 16), torch.randint(0, 24, (256,))) for _ in range(6)]
    losses = train(twin, sgd(twin), data, classified)
    o = sgd(model)
    with optimize(model, o, budget="min", max_slowdown=math.inf, offload="disk", compress="lossless", **QUIET) as run:
        found = train(model, o, data, classified)
        main = state_of(run)
    assert isinstance(main, Running) and main.peaks.measured_nbytes is not None
    assert_same(state(twin), state(model))
    assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True))
    assert "positive@disk" in {life.form for life in main.plan.lives if life.how == "fetch"}
    assert main.peaks.measured_nbytes <= main.plan.budget_nbytes
    assert abs(main.peaks.measured_nbytes / main.plan.predicted_peak_nbytes - 1) <= 0.01


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_codecs_have_room_for_their_own_bytes(offload: str) -> None:
    """What encoding allocates on its way is within the budget where it is most of what the peak has."""
    torch.manual_seed(0)
    model = Gates(wide=False)
    data = [(torch.randn(256, 16), torch.randint(0, 24, (256,))) for _ in range(6)]
    o = sgd(model)
    with optimize(model, o, budget="min", offload=offload, compress="lossless", **QUIET) as run:
        train(model, o, data, classified)
        main = state_of(run)
    assert isinstance(main, Running) and main.peaks.measured_nbytes is not None
    assert any(life.how == "fetch" for life in main.plan.lives)
    assert main.peaks.measured_nbytes <= main.plan.budget_nbytes
    assert abs(main.peaks.measured_nbytes / main.plan.predicted_peak_nbytes - 1) <= 0.01


def test_nothing_is_left_behind(smallest: int) -> None:
    """Files, threads and depots are gone when the block ends, also by an exception."""
    import threading

    before = threading.active_count()
    budget = int(0.9 * smallest) + counted_nbytes()
    model = wide()
    with pytest.raises(ZeroDivisionError), optimize(model, o := sgd(model), budget=budget, offload="disk", **QUIET):
        train(model, o, batches(5, size=96))
        raise ZeroDivisionError
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "tape"}, "offload is 'tape'"),
        ({"offload": "host:/tmp"}, "offload is 'host:/tmp'; .*'disk:/a/directory'"),
        ({"offload": "disk:"}, "name a directory after the colon"),
        ({"offload": None}, "offload is None"),
        ({"compress": "zip"}, "compress is 'zip'"),
        ({"offload": "disk", "objective": "flops"}, "objective='flops'"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MemOptConfig(**options)


@pytest.mark.real_times
def test_the_disks_directory_is_the_one_that_was_named(smallest: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The check before anything runs, the probe and the plans all use it; the bits are those of the plain run."""
    made: list[str] = []
    real = tempfile.TemporaryFile

    def recorded(**options: Any) -> Any:
        made.append(options["dir"])
        return real(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", recorded)
    expected, _ = plain(wide(), 4)
    run, found, _ = trained(wide(), 4, budget=int(0.9 * smallest) + counted_nbytes(), offload=f"disk:{tmp_path}")
    assert_same(expected, found)
    assert run.plan is not None and any(tier_of(life.form) for life in run.plan.lives)
    assert made == [str(tmp_path)] * 3 and not list(tmp_path.iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MemOptConfig(offload="disk:~/fast").offload_to == ("disk", f"{tmp_path}/fast")


@pytest.mark.parametrize("where", ["missing", "a file", "/proc"])
def test_a_directory_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").write_text("")
    directory = str(tmp_path / where)
    model = wide()
    with pytest.raises(OffloadError, match=f"cannot make a file in '{directory}': .*offload='disk:/"):
        with optimize(model, sgd(model), offload=f"disk:{directory}", **QUIET):
            raise AssertionError("the block was entered")
    with optimize(model, sgd(model), **QUIET):
        pass  # nothing was attached


def test_a_disk_that_is_too_small_is_named(smallest: int, tmp_path: Path) -> None:
    """A limit on the size of files here: the step that would need more is refused, with what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OffloadError, match=f"cannot reserve .* in '{tmp_path}': .*larger budget, .*offload='disk:/"):
            trained(wide(), 4, budget=int(0.9 * smallest) + counted_nbytes(), offload=f"disk:{tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.real_times
def test_rates_are_measured_by_small_copies_on_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may leave no piece of memory that is large enough for a usual copy."""
    asked: list[int] = []

    def full(tiers: list[Any], *others: Any) -> MachineRates:
        asked.append(tiers[0].capacity_nbytes)
        if asked[-1] > 1 << 20:
            raise torch.OutOfMemoryError("no room")
        return link.measure(tiers, *others)

    monkeypatch.setattr(offloading_module, "measure", full)
    offloading = Offloading(torch.device("cpu"), MemOptConfig(offload=f"disk:{tmp_path}", solver_seconds=1))
    assert offloading.rates.links["disk"].out_bytes_per_second > 0
    assert len(asked) == 2 and asked[0] > asked[1] and not list(tmp_path.iterdir())
    offloading.close()


@pytest.mark.real_times
def test_rates_are_measured_beside_whatever_is_entered_here(tmp_path: Path) -> None:
    """A plan is solved when a step ends. The user's modes and hooks have no part in what is measured."""
    offloading = Offloading(torch.device("cpu"), MemOptConfig(offload=f"disk:{tmp_path}", compress="lossy"))
    packed: list[torch.Tensor] = []
    with Counting() as mode, torch.autocast("cpu"), torch.inference_mode():
        with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: _):
            rates = offloading.rates
    assert mode.ops == 0 and not packed
    assert rates.links.keys() == {"disk"} and rates.codecs.keys() >= {"bools", "positive", "block8"}
    assert offloading.rates is rates and not list(tmp_path.iterdir())


def test_the_strategy_takes_the_same_option() -> None:
    pytest.importorskip("lightning")
    from lightning_memopt import MemOptStrategy

    assert MemOptStrategy(offload="disk:/fast").memopt_config == MemOptConfig(offload="disk:/fast")
    with pytest.raises(ConfigError, match="'tape:/x'"):
        MemOptStrategy(offload="tape:/x")


def test_host_needs_a_device_beside_it() -> None:
    """On the CPU, offloading to host memory saves nothing: it is refused, and the message says what to do."""
    model = small()
    with pytest.raises(ConfigError, match="disk"), optimize(model, sgd(model), offload="host", **QUIET):
        pass
