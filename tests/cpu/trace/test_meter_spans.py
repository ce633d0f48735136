"""torch ends a span in the memory of the profiler under which it began: with another one running by then, it crashes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.session.measure import peak_meter
from lightning_memopt.session.observe import observation
from lightning_memopt.trace import AllocatorEvents, metered_cpu
from tests.cpu.lib.fits import fit, memopt
from tests.cpu.lib.loops import BATCH, agrees, batches, loss_of, without_counter

Spans = list[tuple[object, object]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Of every span of `Optimizer.step` which meter ran when it began, and which when it ended."""
    without_counter(monkeypatch)
    running: list[object] = []
    spans: Spans = []

    @contextlib.contextmanager
    def metered() -> Iterator[AllocatorEvents]:
        with metered_cpu() as events:
            running.append(events)
            yield events
        running.remove(events)

    class Span(torch.autograd.profiler.record_function):
        def __enter__(self) -> Any:
            self.began = running[-1] if running else None
            return super().__enter__()

        def __exit__(self, *raised: Any) -> None:
            if self.name.startswith("Optimizer.step"):
                spans.append((self.began, running[-1] if running else None))
            super().__exit__(*raised)

    for module in (observation, peak_meter):
        monkeypatch.setattr(module, "metered_cpu", metered)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", Span)
    return spans


def ends_where_it_began(spans: Spans) -> bool:
    return all(began is None or ended is None or began is ended for began, ended in spans)


def test_accumulation_in_lightning(spans: Spans) -> None:
    """A batch before the span, one inside of it."""
    fit(memopt(profile_steps=2), accumulate_grad_batches=2, max_epochs=2)
    assert any(ended is not None for _, ended in spans)
    assert ends_where_it_began(spans)


@pytest.mark.parametrize("late", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("inside", [BATCH // 2, BATCH], ids=["planned", "new"])
def test_a_closure_with_another_batch(inside: int, late: bool, spans: Spans) -> None:
    """A batch that is observed before the span; inside of it one that is to be measured, or observed, until another optimizer
    has stepped too, or after another one has."""

    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = model.parameters()
        return [torch.optim.SGD(of, 0.05) for of in ([first], others)]

    def run_all(model: nn.Module, two: list[torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        for k, size in enumerate((BATCH // 2, BATCH + 2, BATCH + 2)):

            def closure(size: int = inside, k: int = k) -> Tensor:
                loss = loss_of(model, batches(1, size=size, seed=k)[0])
                loss.backward()
                return loss

            model.zero_grad()
            closure(size)
            closures = [None, closure if k else None]
            for optimizer, of in zip(two, closures if late else reversed(closures), strict=True):
                optimizer.step(of)  # type: ignore[arg-type]

    run = agrees(run_all, make=both, profile_steps=1)
    assert any(began is not None for began, _ in spans) and run.plan is not None
    assert ends_where_it_began(spans)
