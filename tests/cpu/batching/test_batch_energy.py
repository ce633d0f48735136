"""Batch sizes by joules: read from a device's counter in repeated steps, fitted, confirmed; or refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_memopt import MemOptBatchScaler, find_max_batch_size
from lightning_memopt.batching import BatchSizeResult, energy
from lightning_memopt.batching.energy import EnergyModel, MeasuredEnergy, StepEnergy, fitted, given
from lightning_memopt.errors import ConfigError, EnergyUnavailableError
from tests.cpu.lib.fake_nvml import Board, Clock, FakeNvml, install
from tests.cpu.lib.loops import batches, loss_of, small, step

pytestmark = pytest.mark.profiled  # their budgets are those of a process that holds nothing else

BUDGET = 500_000
FIXED, A_SAMPLE = 0.5, 0.25
QUIET: dict[str, Any] = dict(budget=BUDGET, start=8, mode="energy")


class Card:
    """A CPU that a fake NVML takes for a card: a step takes `seconds(size)` and `joules(size)`, and counts what ran."""

    def __init__(self, board: Board, joules: Callable[[int], float], seconds: Callable[[int], float]) -> None:
        self.board, self.clock, self.joules, self.seconds = board, board.clock, joules, seconds
        self.model = small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.sizes: list[int] = []

    def step(self, batch: Any) -> None:
        size = len(batch[0])
        self.sizes.append(size)
        self.clock.after(self.seconds(size))
        self.board.counted += round(1e3 * self.joules(size))
        step(self.model, self.optimizer, batch)

    def find(self, source: Any = None, **options: Any) -> BatchSizeResult:
        options = {**QUIET, "planned": False, **options}
        make = source or (lambda size: batches(1, size)[0])
        return find_max_batch_size(self.step, make, self.model, self.optimizer, **options)


def line(size: int) -> float:
    return FIXED + A_SAMPLE * size


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """One board that draws nothing by itself, which the CPU is taken for."""
    clock = Clock()
    fake = FakeNvml([Board("a", clock, watts=0.0)])
    cuda = install(monkeypatch, fake)

    class OfTheCpu(StepEnergy):
        def __init__(self, device: torch.device, _: Any) -> None:
            super().__init__(cuda(0), clock)
            self._device = device  # nothing to synchronise

    monkeypatch.setattr("lightning_memopt.batching.search.StepEnergy", OfTheCpu)
    yield fake
    assert fake.open == 0, "NVML was left open"


@pytest.mark.parametrize(("seconds", "why"), [(0.03, "many steps"), (0.4, "a few"), (1.5, "one")], ids=str)
def test_joules_are_those_of_the_counter(nvml: FakeNvml, seconds: float, why: str) -> None:
    """At sizes that were not measured too; steps are repeated for as long as the counter needs, and counted."""
    card = Card(nvml.boards[0], line, lambda size: seconds)
    found = card.find()
    assert found.joules_per_sample == pytest.approx(line(found.size) / found.size, rel=0.01)
    assert found.measured_joules_per_sample == pytest.approx(line(found.size) / found.size, rel=0.01)
    assert len(card.sizes) == found.profile_steps + found.trial_steps + found.energy_steps
    assert (found.profile_steps, found.trial_steps) == (3, 1)
    windows = [t for t in found.trials if t.kind == "energy"]
    assert len(windows) == 3 and all(t.steps <= 2 + -(-1.0 // seconds) for t in windows)
    assert all(t.steps * seconds >= 1.0 for t in windows), "shorter than the counter is read"
    assert windows[0].size < windows[1].size < found.size == windows[2].size
    assert "counter at batches" in found.energy_source and "J/sample measured" in str(found)
    assert f"{found.energy_steps} for energy" in str(found)


def test_the_size_with_the_fewest_joules_is_chosen(nvml: FakeNvml) -> None:
    """A card that takes the same for every sample is best where rebuilds take nothing: at no plan. One whose steps take
    nearly the same whatever their size is best at the largest, whatever rebuilds take."""
    plain = Card(nvml.boards[0], line, lambda size: 0.5).find().size
    each = Card(nvml.boards[0], lambda size: A_SAMPLE * size, lambda size: 0.5).find(planned=True, solver_seconds=2.0)
    assert each.size <= plain and not each.planned
    step = Card(nvml.boards[0], lambda size: 1e5, lambda size: 1e3).find(planned=True, solver_seconds=2.0)
    assert step.size > 1.5 * plain and step.planned
    assert step.joules_per_sample == pytest.approx(1e5 / step.size, rel=0.01)
    assert step.measured_joules_per_sample == pytest.approx(1e5 / step.size, rel=0.01)


def test_an_update_is_shared_by_the_batches_that_it_accumulates(nvml: FakeNvml) -> None:
    """Measured steps have an update each: what it takes is taken off again, and no sum of such steps is said to be measured."""
    card = Card(nvml.boards[0], line, lambda size: 0.5)
    found = card.find(effective=96)
    assert found.size in (24, 32, 48) and found.measured_joules_per_sample is None
    assert found.joules_per_sample is not None and found.joules_per_sample < line(found.size) / found.size


def test_given_watts_need_no_counter() -> None:
    card = Card(Board("a", Clock()), line, lambda size: 0.0)
    found = card.find(watts=200.0)
    assert found.joules_per_sample == pytest.approx(200.0 / found.samples_per_second)  # type: ignore[operator]
    assert found.measured_joules_per_sample is None and found.energy_steps == 0 and "given 200 W" in str(found)


def test_where_no_size_fits_without_a_plan_only_the_answer_is_measured(nvml: FakeNvml) -> None:
    card = Card(nvml.boards[0], line, lambda size: 0.5)
    card.model = small(width=64, depth=6)
    card.optimizer = torch.optim.AdamW(card.model.parameters(), 1e-3)
    whole = card.step
    card.step = lambda batch: whole(tuple(t.repeat(30, 1) for t in batch))  # type: ignore[method-assign]
    found = card.find(planned=True, solver_seconds=2.0, start=4, budget=1_500_000)
    assert found.planned and "no size fits without a plan" in found.why
    assert found.joules_per_sample is None and found.energy_source == ""
    assert found.measured_joules_per_sample == pytest.approx(line(30 * found.size) / found.size, rel=0.01)


def test_without_a_counter_it_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(Board("a", Clock()), line, lambda size: 0.5)
    with pytest.raises(ConfigError, match=r"of cpu cannot be read: it is not an NVIDIA.*Give watts=, or use mode='throughput'"):
        card.find()
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match="install nvidia-ml-py.*Give watts="):
        StepEnergy(torch.device("cuda", 0))
    for raises in ({"energy": "NotSupported", "power": "NotSupported"}, {"energy": "NoPermission", "power": "NoPermission"}):
        fake = FakeNvml([Board("a", Clock(), raises=raises)])
        install(monkeypatch, fake)
        with pytest.raises(ConfigError, match="neither its energy"):
            StepEnergy(torch.device("cuda", 0))
        assert fake.open == 0
    assert not card.sizes and not card.optimizer.state


def test_a_counter_that_is_lost_ends_the_search_and_puts_everything_back(nvml: FakeNvml) -> None:
    board = nvml.boards[0]
    card = Card(board, line, lambda size: 0.5)
    before = [p.clone() for p in card.model.parameters()]

    def lost(size: int) -> float:
        if len(card.sizes) > 6:
            board.raises["energy"] = "GpuIsLost"
        return line(size)

    card.joules = lost
    with pytest.warns(UserWarning, match="no energy is reported"), pytest.raises(EnergyUnavailableError, match="Give watts="):
        card.find()
    assert all(torch.equal(a, b) for a, b in zip(before, card.model.parameters(), strict=True)) and not card.optimizer.state


def test_sampled_power_is_said_to_be(nvml: FakeNvml) -> None:
    nvml.boards[0].raises["energy"] = "NotSupported"
    nvml.boards[0].watts = 100.0
    found = Card(nvml.boards[0], line, lambda size: 0.5).find()
    assert "sampled power" in found.energy_source
    assert found.joules_per_sample == pytest.approx(50.0 / found.size, rel=0.02)


def test_batches_that_a_step_takes_apart_are_whole_in_the_next(nvml: FakeNvml) -> None:
    card = Card(nvml.boards[0], line, lambda size: 0.3)
    whole = card.step
    card.step = lambda batch: whole((batch.pop("x"), batch.pop("y")))  # type: ignore[method-assign]
    found = card.find(lambda size: dict(zip("xy", batches(1, size)[0], strict=True)))
    assert found.measured_joules_per_sample is not None


def test_lines_never_fall_and_never_begin_below_nothing() -> None:
    one, two = MeasuredEnergy(8, 10, 2.0, 100.0), MeasuredEnergy(32, 10, 4.0, 160.0)
    found = fitted(one, two, False)
    assert found.joules(8, 0.2, 0.0) == pytest.approx(10.0) and found.joules(32, 0.4, 0.0) == pytest.approx(16.0)
    assert found.joules(32, 0.4, 0.1) == pytest.approx(16.0 + 0.1 * 40.0), "at the watts of the larger one"
    assert fitted(one, MeasuredEnergy(32, 10, 4.0, 90.0), False).joules(64, 1.0, 0.0) == pytest.approx(9.0)
    assert fitted(one, MeasuredEnergy(32, 10, 4.0, 900.0), False).joules(1, 0.1, 0.0) == pytest.approx(90.0 / 32)
    alone = fitted(None, two, True)
    assert alone.joules(5, 0.5, 0.25) == pytest.approx(0.75 * 40.0) and "sampled" in alone.source
    assert given(30.0).joules(5, 0.5, -0.1) == pytest.approx(12.0) and EnergyModel(10.0, "").joules(1, 0.1, -1.0) == 0.0


def test_steps_that_never_fill_a_second_give_no_number(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_MOST_STEPS", 12)
    card = Card(nvml.boards[0], line, lambda size: 0.0)
    with pytest.raises(EnergyUnavailableError, match="12 steps of batch"):
        card.find()


class Module(pl.LightningModule):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self.net, self.card = card.model, SimpleNamespace(card=card)  # no module: what it counts is not put back

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        card = self.card.card
        card.clock.after(card.seconds(len(batch[0])))
        card.board.counted += round(1e3 * card.joules(len(batch[0])))
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(*batches(1, 96)[0])
        return torch.utils.data.DataLoader(data, batch_size=96)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_has_it_too(nvml: FakeNvml) -> None:
    """96 samples an update, in as many batches as take the fewest joules."""
    card = Card(nvml.boards[0], line, lambda size: 0.5)
    scaler = MemOptBatchScaler(mode="energy", budget=BUDGET, verbose=False)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    pl.Trainer(accelerator="cpu", max_steps=1, callbacks=[scaler], **quiet).fit(Module(card))  # type: ignore[arg-type]
    chosen = scaler.result
    assert chosen is not None and chosen.joules_per_sample is not None and chosen.energy_steps > 0
    assert chosen.joules_per_sample == pytest.approx(line(chosen.size) / chosen.size, rel=0.1)
