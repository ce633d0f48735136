"""Plain PyTorch: the loop inside `with optimize(...)` gives the same bits within the budget, and nothing is left after it."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import AlreadyAttachedError
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.observing import Observing
from lightning_memopt.session.observe.resident import resident_nbytes, resident_tensors
from lightning_memopt.trace import memory
from tests.cpu.lib.inside import current_of, state_of, states_of
from tests.cpu.lib.loops import (
    QUIET,
    Batch,
    assert_same,
    batches,
    budget_at,
    counted_nbytes,
    installed,
    leaves_nothing,
    loss_of,
    sgd,
    small,
    state,
    train,
    without_counter,
)

SMALL = 1 << 14
"""Bytes that no prediction counts: generator states, the zero-dimensional results of checksums."""


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd_momentum": sgd,
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
}


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


@pytest.mark.parametrize("loss", [loss_of, autocast_loss], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p1_p5_p6_same_bits_within_the_budget(name: str, loss: Any) -> None:
    """Parameters, buffers, losses and the generator after 8 steps are the plain run's; the peak is kept and was predicted."""
    data = batches(8)
    model = small()
    plain = train(model, OPTIMIZERS[name](model), data, loss)
    expected = state(model)
    del model  # what is alive counts
    beyond: list[int | None] = [None]  # bytes of a budget beyond what the process holds before the run; None: the smallest plan
    while beyond:
        more, held = beyond.pop(0), counted_nbytes()
        budget = "min" if more is None else held + more
        model = small()
        with leaves_nothing(model), optimize(model, optimizer := OPTIMIZERS[name](model), budget=budget, **QUIET) as run:
            losses = train(model, optimizer, data, loss)
            found = state_of(run)
        assert_same(expected, state(model))
        assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
        assert isinstance(found, Running) and found.peaks.measured_nbytes is not None
        predicted = found.plan.predicted_peak_nbytes
        assert abs(found.peaks.measured_nbytes - predicted) <= 0.01 * predicted + SMALL
        if isinstance(budget, str):
            assert predicted - held < 0.75 * (found.plan.unmodified_peak_nbytes - held)
            beyond += [budget_at(run, 0.6) - held, budget_at(run, 0.3) - held]
        else:
            assert found.peaks.measured_nbytes <= budget
        del run, found, model, optimizer, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_by_the_only_observed_step_is_planned_for(name: str) -> None:
    """The optimizer makes its state in the one step that is observed; the planned steps begin with it, as predicted."""
    model = small()
    with optimize(model, o := OPTIMIZERS[name](model), budget="min", verbose=False, profile_steps=1) as run:
        train(model, o, batches(3))
        found = state_of(run)
    assert isinstance(found, Running) and found.peaks.measured_nbytes is not None
    predicted = found.plan.predicted_peak_nbytes
    assert abs(found.peaks.measured_nbytes - predicted) <= 0.01 * predicted + SMALL // 4


def test_update_of_the_only_observed_step_is_not_metered() -> None:
    """The meter of ops is closed when a budget is checked before the first update: no op after that has a measured
    workspace.
    """
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(3))
    budget = budget_at(run, 0.6)
    model = small()
    with optimize(model, optimizer := sgd(model), budget=budget, verbose=False, profile_steps=1) as run:
        train(model, optimizer, batches(3))
        found = state_of(run)
    assert isinstance(found, Running) and 0 < found.plan.unmodified_peak_nbytes < 1 << 30
    assert found.peaks.measured_nbytes is not None and found.peaks.measured_nbytes <= budget


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """For every observed step, the peak by the tracer's ledger, and by the allocator if the session metered the step."""
    found: list[tuple[int, int | None]] = []
    begin, finish = Observation.begin_round, Observation.finish

    def begin_round(self: Observation, batch: Any, *rest: Any) -> Any:
        self.base = resident_nbytes(resident_tensors(self.model, self.optimizers, batch), self.device)  # type: ignore[attr-defined]
        return begin(self, batch, *rest)

    def finished(self: Observation) -> Any:
        graph = finish(self)
        metered = self.events is not None and self.events.available
        found.append((self.peak_nbytes, self.base + self.events.peak_nbytes if metered else None))  # type: ignore
        return graph

    monkeypatch.setattr(Observation, "begin_round", begin_round)
    monkeypatch.setattr(Observation, "finish", finished)
    return found


def test_observing_keeps_the_budget(observed: list[tuple[int, int | None]]) -> None:
    """The observed steps are within the budget too, by the ledger and by the allocator, and give the plain run's bits."""
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = dict(n_layer=4, n_embd=48, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)).train()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch[0], labels=batch[0]).loss

    data = [(torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(i)),) * 2 for i in range(3)]
    model = build()
    train(model, sgd(model), data, loss)
    expected = state(model)
    budgets: list[str | int] = ["min"]
    while budgets:
        budget = budgets.pop(0)
        observed.clear()
        model = build()
        with optimize(model, optimizer := sgd(model), budget=budget, verbose=False) as run:
            train(model, optimizer, data, loss)
        assert_same(expected, state(model))
        assert len(observed) == 3 and observed[0][1] is not None
        if budget == "min":
            least = run.status().frontier.smallest_nbytes * 21 // 20  # type: ignore[union-attr]
            budgets += [max(least, budget_at(run, share)) for share in (0.8, 0.6, 0.4, 0.25)]
        else:
            for ledger, metered in observed:
                assert ledger <= budget and (metered or 0) <= budget, (budget, observed)


def test_profilers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metered step's trace is freed with the step. If the collector freed it while a later trace is taken, Kineto would
    crash.
    """
    without_counter(monkeypatch)
    made: list[Any] = []
    original = memory.profile
    monkeypatch.setattr(memory, "profile", lambda **options: made.append(original(**options)) or made[-1])
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET):
        train(model, optimizer, batches(4))
    assert made and all(profiler.profiler is None for profiler in made)


def _pickled(model: nn.Module) -> bytes:
    out = io.BytesIO()
    torch.save(model, out)
    return pickle.dumps(model) + out.getvalue()


def test_p22_pickle_and_copy() -> None:
    """Pickles of the model are byte for byte the same while attached and after; a copy made inside trains its own weights."""
    model = small()
    before = _pickled(model)
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET):
        assert _pickled(model) == before
    assert _pickled(model) == before
    with optimize(model, optimizer, budget="min", **QUIET):
        train(model, optimizer, batches(4))
        twin = copy.deepcopy(model)
        assert vars(twin).keys() == vars(small()).keys()
        with torch.no_grad():
            twin.layers[0].weight.zero_()
        assert not torch.equal(twin.eval()(batches(1)[0][0]), model.eval()(batches(1)[0][0]))


def test_p35_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEMOPT_DISABLE=1 gives the plain run exactly: nothing is recorded, not even the plan file is read."""
    model = small()
    train(model, sgd(model), batches(4))
    expected = state(model)
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    model = small()
    with optimize(model, optimizer := sgd(model), budget="1B", plan="/nowhere.json", **QUIET) as run:
        before = installed()
        value = loss_of(model, batches(1)[0])
        assert installed()[:2] == before[:2]
        assert type(value.grad_fn.next_functions[0][0]).__name__ != "Handle"
        model = small()
    with optimize(model, optimizer := sgd(model), budget="1B", **QUIET) as run:
        train(model, optimizer, batches(4))
        assert states_of(run) == {} and run.plan is None and run.frontier() == []
        assert "off" in run.report()
    assert_same(expected, state(model))


def test_pause() -> None:
    """Inside run.pause() the model runs plainly; the run goes on afterwards with the bits of the plain run."""
    model = small()
    train(model, sgd(model), batches(8))
    expected = state(model)
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        torch.manual_seed(7)
        for i, batch in enumerate(batches(8)):
            with run.pause() if i in (1, 5) else contextlib.nullcontext():
                value = loss_of(model, batch)
                assert installed()[0] is None
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert i not in (1, 5) or installed()[1] == []
        assert run.status().phase == "planned"
    assert_same(expected, state(model))


def test_frontier_and_report() -> None:
    """The frontier falls in time as it rises in bytes; the report has the budget and all peaks, or what is missing."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        assert "no training step" in run.report() and run.frontier() == []
        train(model, optimizer, batches(1))
        assert "observing (1 of 2" in run.report()
        train(model, optimizer, batches(3))
        rows = run.frontier()
        assert len(rows) > 5
        pairs = list(itertools.pairwise(rows))
        assert all(a.peak_nbytes < b.peak_nbytes and a.extra_seconds > b.extra_seconds for a, b in pairs)
        assert rows[-1].rebuilt_nbytes == 0
        text = run.report()
        for word in ("budget", "predicted peak", "measured peak", "unmodified peak", "rebuilt", "kept"):
            assert word in text
        assert "not measured" not in text


def test_plan_file(tmp_path: Any) -> None:
    """A saved plan is in force from the first step of the next run, which observes nothing and gives the same bits."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(5))
        run.save_plan(tmp_path / "plan.json")
        predicted = run.plan.predicted_peak_nbytes  # type: ignore[union-attr]
    expected = state(model)
    model = small()
    with optimize(model, optimizer := sgd(model), budget="auto", plan=tmp_path / "plan.json", **QUIET) as run:
        loss_of(model, batches(1)[0])
        assert isinstance(current_of(run), Running)
    del run, model, optimizer  # what is alive counts
    gc.collect()
    model = small()
    with optimize(model, optimizer := sgd(model), budget=predicted, plan=tmp_path / "plan.json", **QUIET) as run:
        train(model, optimizer, batches(5))
        found = state_of(run)
        assert isinstance(found, Running) and found.peaks.steps == 5 and not found.drift.deviated
        assert not any(isinstance(s, Observing) for s in states_of(run).values())
        held = sum(t.nbytes for t in expected.values())  # like this run's losses, not there when the plan was made
        assert found.peaks.measured_nbytes is not None and found.peaks.measured_nbytes <= predicted + held + 64
    assert_same(expected, state(model))


def test_nested_is_refused() -> None:
    """A model inside a block cannot enter a second one; after the first it can."""
    model = small()
    optimizer = sgd(model)
    with optimize(model, optimizer, budget="min", **QUIET), pytest.raises(AlreadyAttachedError):
        with optimize(model, optimizer, budget="min", **QUIET):
            pass
    with optimize(model, optimizer, budget="min", **QUIET):
        pass
