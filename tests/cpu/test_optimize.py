"""Plain PyTorch: the loop inside `with optimize(...)` gives the same bits within the budget, and nothing is left after it."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import AlreadyAttachedError
from lightning_memopt.session.buckets import Observing, Running
from lightning_memopt.session.budget import resident_nbytes, resident_tensors
from lightning_memopt.session.observation import Observation
from lightning_memopt.trace import memory
from tests.cpu.loops import (
    BATCH,
    Batch,
    assert_same,
    batches,
    budget_at,
    installed,
    leaves_nothing,
    loss_of,
    sgd,
    small,
    state,
    step,
    train,
)

SMALL = 1 << 14
"""Bytes that no prediction counts: generator states, the zero-dimensional results of checksums."""

QUIET: dict[str, Any] = dict(verbose=False, profile_steps=2)

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
def test_same_bits_within_the_budget(name: str, loss: Any) -> None:
    """Parameters, buffers, losses and the generator after 8 steps are the plain run's; the peak is kept and was predicted."""
    data = batches(8)
    model = small()
    plain = train(model, OPTIMIZERS[name](model), data, loss)
    expected = state(model)
    budgets: list[str | int] = ["min"]
    while budgets:
        budget = budgets.pop(0)
        model = small()
        with leaves_nothing(model), optimize(model, optimizer := OPTIMIZERS[name](model), budget=budget, **QUIET) as run:
            losses = train(model, optimizer, data, loss)
            found = run.session.main
        assert_same(expected, state(model))
        assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
        assert isinstance(found, Running) and found.measured_bytes is not None
        predicted = found.plan.predicted_peak_bytes
        assert abs(found.measured_bytes - predicted) <= 0.01 * predicted + SMALL
        if budget == "min":
            assert found.plan.predicted_peak_bytes < 0.75 * found.plan.unmodified_peak_bytes
            budgets += [budget_at(run, 0.6), budget_at(run, 0.3)]
        else:
            assert found.measured_bytes <= budget


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_by_the_only_observed_step_is_planned_for(name: str) -> None:
    """The optimizer makes its state in the one step that is observed; the planned steps begin with it, as predicted."""
    model = small()
    with optimize(model, o := OPTIMIZERS[name](model), budget="min", verbose=False, profile_steps=1) as run:
        train(model, o, batches(3))
        found = run.session.main
    assert isinstance(found, Running) and found.measured_bytes is not None
    predicted = found.plan.predicted_peak_bytes
    assert abs(found.measured_bytes - predicted) <= 0.01 * predicted + SMALL // 4


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Of every observed step: the peak by the tracer's ledger, and by the allocator where the session metered it."""
    found: list[tuple[int, int | None]] = []
    begin, finish = Observation.begin_round, Observation.finish

    def begin_round(self: Observation, batch: Any) -> Any:
        self.base = resident_nbytes(resident_tensors(self.model, self.optimizers, batch), self.device)  # type: ignore[attr-defined]
        return begin(self, batch)

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
            least = run.session.frontier.smallest_bytes * 21 // 20  # type: ignore[union-attr]
            budgets += [max(least, budget_at(run, share)) for share in (0.8, 0.6, 0.4, 0.25)]
        else:
            for ledger, metered in observed:
                assert ledger <= budget and (metered or 0) <= budget, (budget, observed)


def test_profilers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metered step's trace is freed with the step: freed by the collector while a later one is taken, Kineto crashes."""
    made: list[Any] = []
    original = memory.profile
    monkeypatch.setattr(memory, "profile", lambda **options: made.append(original(**options)) or made[-1])
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET):
        train(model, optimizer, batches(4))
    assert made and all(profiler.profiler is None for profiler in made)


def test_accumulation_validation_and_a_smaller_batch() -> None:
    """Two rounds a step, evaluation in between and a last smaller batch: the plain run's bits, a plan for each batch size."""
    data = batches(11) + batches(1, size=5)

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(3)
        seen = []
        for epoch in range(2):
            for i, batch in enumerate(data):
                (loss_of(model, batch) / 2).backward()
                if i % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                if i % 5 == epoch:
                    model.eval()
                    with torch.no_grad():
                        seen.append(loss_of(model, data[0]))
                    model.train()
        return seen

    model = small()
    plain = run_all(model, sgd(model))
    expected = state(model)
    model = small()
    with leaves_nothing(model), optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        seen = run_all(model, optimizer)
        assert sum(isinstance(s, Running) for s in run.session.buckets.values()) == 2
        assert run.plan is not None and run.plan.predicted.replayed_ops > 0
    assert_same(expected, state(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


class Boom(Exception):
    pass


class Fault(nn.Module):
    """Raises where it is armed, once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.armed: tuple[str, type[BaseException]] | None = None

    def fire(self, where: str, *_: Any) -> None:
        if self.armed is not None and self.armed[0] == where:
            raised, self.armed = self.armed[1], None
            raise raised(where)

    def forward(self, x: Tensor) -> Tensor:
        self.fire("forward, at its begin")
        h = self.inner.embed(x)
        h.register_hook(lambda g: self.fire("backward"))
        h = torch.nn.functional.gelu(self.inner.layers[0](h))
        self.fire("forward")
        for layer in self.inner.layers[1:]:
            h = torch.nn.functional.gelu(layer(h))
        return self.inner.head(self.inner.dropout(h))


WHERE = ("forward, at its begin", "forward", "between", "backward", "update")


@pytest.mark.parametrize("raised", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_exceptions_then_retry(where: str, raised: type[BaseException]) -> None:
    """After an exception at any point of an observed or of a planned step, going on gives the bits of the plain run."""
    data = batches(6)

    def run_all(model: Fault, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: model.fire("update"))
        torch.manual_seed(5)
        for i, batch in enumerate(data):
            if i in (1, 4):  # the second observed step, the second planned one
                model.armed = where, raised
                with pytest.raises(raised):
                    loss = loss_of(model, batch)
                    model.fire("between")
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            step(model, optimizer, batch)

    torch.manual_seed(0)
    model = Fault()
    run_all(model, sgd(model))
    expected = state(model)
    torch.manual_seed(0)
    model = Fault()
    with leaves_nothing(model), optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        run_all(model, optimizer)
        assert run.plan is not None and run.plan.predicted.replayed_ops > 0
    assert_same(expected, state(model))


@pytest.mark.parametrize("after", [0, 4], ids=["observing", "planned"])
@pytest.mark.parametrize("where", WHERE)
def test_interrupt_leaves_nothing(where: str, after: int) -> None:
    """An interrupt that ends the block leaves torch, the model and the optimizer as they were."""
    torch.manual_seed(0)
    model = Fault()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: model.fire("update"))
    with leaves_nothing(model), pytest.raises(KeyboardInterrupt), optimize(model, optimizer, budget="min", **QUIET):
        for batch in batches(after):
            step(model, optimizer, batch)
        model.armed = where, KeyboardInterrupt
        loss = loss_of(model, batches(1)[0])
        model.fire("between")
        loss.backward()
        optimizer.step()
    step(model, optimizer, batches(1)[0])


@pytest.mark.parametrize("after", [0, 4], ids=["observing", "planned"])
def test_nothing_is_on_after_a_failed_forward(after: int) -> None:
    """As soon as an interrupted forward was left, no hooks of ours are on, although the block goes on."""
    torch.manual_seed(0)
    model = Fault()
    optimizer = sgd(model)
    before = installed()
    with optimize(model, optimizer, budget="min", **QUIET):
        for batch in batches(after):
            step(model, optimizer, batch)
        model.armed = "forward", KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            model(batches(1)[0][0])
        now = installed()
        assert now[0] is None and now[1] == before[1] == [] and now[3] == before[3]


def _pickled(model: nn.Module) -> bytes:
    out = io.BytesIO()
    torch.save(model, out)
    return pickle.dumps(model) + out.getvalue()


def test_pickle_and_copy() -> None:
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


def test_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert run.session.buckets == {} and run.plan is None and run.frontier() == []
        assert "off" in run.report()
    assert_same(expected, state(model))


def test_recompute_off() -> None:
    """recompute=False leaves the run as it is, and the report says so."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", recompute=False, **QUIET) as run:
        train(model, optimizer, batches(3))
    assert run.session.buckets == {} and "recompute=False" in run.report()


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
        assert isinstance(run.session.main, Running)
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
        assert all(a.peak_bytes < b.peak_bytes and a.extra_seconds > b.extra_seconds for a, b in pairs)
        assert rows[-1].rebuilt_bytes == 0
        text = run.report()
        for word in ("budget", "predicted peak", "measured peak", "unmodified peak", "rebuilt", "kept"):
            assert word in text
        assert "not measured" not in text


def test_plan_file(tmp_path: Any) -> None:
    """A saved plan is in force from the first step of the next run, which observes nothing and gives the same bits."""
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(5))
        run.session.save_plan(tmp_path / "plan.json")
        predicted = run.plan.predicted_peak_bytes  # type: ignore[union-attr]
    expected = state(model)
    model = small()
    with optimize(model, optimizer := sgd(model), budget="auto", plan=tmp_path / "plan.json", **QUIET) as run:
        loss_of(model, batches(1)[0])
        assert isinstance(run.session.current, Running)
        model = small()
    with optimize(model, optimizer := sgd(model), budget=predicted, plan=tmp_path / "plan.json", **QUIET) as run:
        train(model, optimizer, batches(5))
        found = run.session.main
        assert isinstance(found, Running) and found.steps == 5 and not found.deviated
        assert not any(isinstance(s, Observing) for s in run.session.buckets.values())
        assert found.measured_bytes is not None and found.measured_bytes <= predicted
    assert_same(expected, state(model))


def test_several_optimizers() -> None:
    """Two optimizers that step one after the other make one step, whose updates are both in the observed graph."""

    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, second = model.layers.parameters(), [*model.embed.parameters(), *model.norm.parameters()]
        return [torch.optim.AdamW(first, fused=True), torch.optim.SGD(second, lr=0.1, fused=True)]

    def run_all(model: nn.Module, pair: list[torch.optim.Optimizer], alternate: bool) -> None:
        torch.manual_seed(2)
        for i, batch in enumerate(batches(8)):
            loss_of(model, batch).backward()
            for optimizer in [pair[i % 2]] if alternate else pair:
                optimizer.step()
            model.zero_grad()

    for alternate in (False, True):
        model = small()
        run_all(model, both(model), alternate)
        expected = state(model)
        model = small()
        pair = both(model)
        with leaves_nothing(model), optimize(model, pair, budget="min", **QUIET) as run:
            run_all(model, pair, alternate)
            assert run.plan is not None
            updates = " ".join(op.name for op in run.session.frontier.graph.ops if op.phase == "update")
            assert alternate or ("_fused_adamw_" in updates and "_fused_sgd_" in updates)
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


def test_two_models_at_once() -> None:
    """Two models in blocks of their own, trained in turn, each give the plain run's bits."""

    def run_all(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
        torch.manual_seed(1)
        for batch in batches(5):
            for model, optimizer in pairs:
                step(model, optimizer, batch)

    expected = [(m := small(seed)) and (m, sgd(m)) for seed in (0, 1)]
    run_all(expected)
    found = [(m := small(seed)) and (m, sgd(m)) for seed in (0, 1)]
    with optimize(*found[0], budget="min", **QUIET) as one, optimize(*found[1], budget="min", **QUIET) as two:
        run_all(found)
        assert one.plan is not None and two.plan is not None
    for (a, _), (b, _) in zip(expected, found, strict=True):
        assert_same(state(a), state(b))


def test_closure() -> None:
    """A closure that is given to the optimizer's step: the plain run's bits, and a plan."""

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        for batch in batches(4):

            def closure(batch: Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    make: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)  # noqa: E731
    model = small(dropout=0.0)
    run_all(model, make(model))
    expected = state(model)
    model = small(dropout=0.0)
    with leaves_nothing(model), optimize(model, optimizer := make(model), budget="min", **QUIET) as run:
        run_all(model, optimizer)
        assert run.plan is not None
    assert_same(expected, state(model))


def test_keyword_arguments_choose_the_plan() -> None:
    """Batches given by keyword are told apart by their shapes."""

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, *, words: Tensor) -> Tensor:
            return self.inner(words)

    torch.manual_seed(0)
    model = Keyword()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(3) + batches(2, size=BATCH // 2), lambda m, b: m(words=b[0]).square().mean())
        assert len(run.session.buckets) == 2


def test_extra_ops_on_some_steps() -> None:
    """A metric on every second step is no other model: there is a plan, it survives, and the bits are the plain run's."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.calls, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.calls += 1
            if self.calls % 2:
                self.seen.append(out.detach().abs().mean().item())
            return out

    def run_all(**options: Any) -> tuple[Logging, Any]:
        torch.manual_seed(0)
        model = Logging()
        optimizer = sgd(model)
        with optimize(model, optimizer, **options) if options else contextlib.nullcontext() as run:
            train(model, optimizer, batches(8))
        return model, run

    plain, _ = run_all()
    model, run = run_all(budget="min", verbose=False, profile_steps=3)
    assert_same(state(plain), state(model))
    assert plain.seen == model.seen
    assert isinstance(run.session.main, Running) and not run.session.main.deviated


def test_evaluation_after_a_failed_step_is_not_observed() -> None:
    """A step that was given up half-way does not leave evaluation being recorded without end."""
    model = small()
    with optimize(model, sgd(model), budget="min", **QUIET):
        loss_of(model, batches(1)[0]).backward()  # and no update
        model.eval()
        for batch in batches(6):
            with torch.no_grad():
                model(batch[0])
        assert installed()[1] == []


def test_threads_of_others_are_left_alone() -> None:
    """Another thread that trains another model meanwhile is neither recorded nor changed."""
    other = small(1)
    train(other, sgd(other), batches(3))
    expected = state(other)
    other = small(1)
    found: list[object] = []

    def work() -> None:
        value = loss_of(other, batches(1)[0])
        found.extend(installed()[:2])
        value.backward()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return self.inner(x)

    model = Outer()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET):
        step(model, optimizer, batches(1)[0])
    assert found == [None, []]
    other = small(1)
    train(other, sgd(other), batches(3))
    assert_same(expected, state(other))
