"""Loops of all shapes inside `with optimize(...)`: they give the same bits, and there is a plan for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.runtime import PlannedEngine
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import (
    BATCH,
    QUIET,
    Batch,
    agrees,
    assert_same,
    batches,
    installed,
    loss_of,
    sgd,
    small,
    state,
    step,
    train,
)


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

    run = agrees(run_all)
    assert sum(isinstance(s, Running) for s in states_of(run).values()) == 2
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


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
        run = agrees(partial(run_all, alternate=alternate), make=both)
        assert run.plan is not None
        updates = " ".join(op.name for op in run.status().frontier.graph.ops if op.phase == "update")
        assert alternate or ("_fused_adamw_" in updates and "_fused_sgd_" in updates)


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

    run = agrees(run_all, partial(small, dropout=0.0), lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3))
    assert run.plan is not None


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
        assert len(states_of(run)) == 2


def test_extra_ops_on_some_steps() -> None:
    """A metric on every second step is not another model: there is a plan, it survives, and the bits are the plain run's."""

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

    def build() -> Logging:
        torch.manual_seed(0)
        return Logging()

    def run_all(model: Logging, optimizer: torch.optim.Optimizer) -> list[float]:
        train(model, optimizer, batches(8))
        return model.seen

    run = agrees(run_all, build, profile_steps=3)
    assert run.status().phase == "planned" and not state_of(run).drift.deviated
    assert "aten::abs" not in state_of(run).program.names, "the plan is made for the step without the metric"


def _metric_while(calls: range) -> Callable[[], nn.Module]:
    """Builds a model that reads a metric off its own layers in some of its calls only."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small(depth=6)
            self.calls, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner
            h = inner.norm(inner.embed(x))
            for layer in inner.layers:
                a = layer(h)
                if self.calls in calls:
                    self.seen.append((a.detach().abs().amax(-1) * 2).mean().item())
                h = h + inner.dropout(nn.functional.gelu(a))
            self.calls += 1
            return inner.head(h)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Watched()

    return build


@pytest.mark.parametrize("calls", [range(0, 4), range(5, 7), range(0)], ids=["observed", "later", "never"])
def test_ops_that_run_in_some_steps_only(calls: range) -> None:
    """Ops that ran while the step was observed and do so no more, or the other way round: all others are still planned."""

    def run_all(model: Any, optimizer: torch.optim.Optimizer) -> list[int]:
        train(model, optimizer, batches(8))
        return model.seen

    run = agrees(run_all, _metric_while(calls), profile_steps=3)
    state = state_of(run)
    assert isinstance(state, Running) and not state.drift.deviated
    assert state.plan.predicted.rebuilt_ops > 6
    model, batch, engine = _metric_while(range(0))(), batches(1)[0], PlannedEngine(state.learned)
    with PlannedRecording(engine, model):
        out = model(batch[0])
    out.sum().backward()
    assert len(engine.rebuilt_ops) >= state.plan.predicted.rebuilt_ops  # nothing is kept for being elsewhere


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
