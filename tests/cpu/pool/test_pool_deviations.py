"""Steps that differ from the planned ones: right all the same, counted, and said."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import counter, install, pool
from lightning_memopt.report.table import pool_text
from lightning_memopt.runtime.pool import PoolStatus, PoolWindows
from tests.cpu.lib.pooled import ROWS, WIDTH, F, arenas_nbytes, batch, both, classifier, plain_step, training

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert arenas_nbytes() == 0


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def status_of(run: Run) -> PoolStatus:
    status = run.status().pool
    assert status is not None
    return status


def test_a_step_with_other_requests() -> None:
    """Metrics in one step and a loss of another shape in another: they fall through, and the steps after them do not."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch()
        logits = model(x)
        if i == 9:
            [torch.empty(1000 + i) for i in range(5)]
            logits = logits.repeat(3, 1).double()[:ROWS].float()
        update(model, optimizer, F.cross_entropy(logits, y))

    status = both(step, steps=16)
    assert status.deviating == 1 and status.last.fallen == 0
    assert 5 <= status.total.fallen <= 20
    assert "1 steps differed" in pool_text(status)


@pytest.mark.calling_thread("the pool of the CPU serves the thread that begins a step (on CUDA it serves streams)")
def test_a_wrong_shaped_step_in_the_same_signature() -> None:
    """The model pads inside, by another number every time: nearly no request has the planned size."""

    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.rows = classifier(), ROWS

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.cat([x, x.new_zeros(self.rows, WIDTH)]))[: len(x)]

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch()
        model.rows = ROWS if i < 8 else ROWS + 8 * i
        update(model, optimizer, F.cross_entropy(model(x), y))

    status = both(step, steps=24, model=Pads)
    assert status.deviating > 3 and status.total.fallen > 15 * status.deviating


def test_steps_that_changed_are_logged_again() -> None:
    said: list[str] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if i >= 9:  # from now on every step has a metric
            (loss.detach() * torch.ones(300)).sum().item()
        update(model, optimizer, loss)

    with training(True) as (run, model, optimizer):
        run.session.pool._say = said.append  # before the first step opens the pool
        for i in range(20):
            step(model, optimizer, i)
        run.session.pool.rests()
        status = status_of(run)
    assert status.deviating == 3 and status.last.fallen == 0 and status.last.served > 0
    assert sum("differs from its planned pool" in line for line in said) == 1
    assert sum("logging one again" in line for line in said) == 1
    assert sum("planned pool in force" in line for line in said) == 2


def test_what_falls_through_counts_against_the_budget() -> None:
    """The arena stays while other requests take memory beside it: where both are above the budget, the pool is given up."""
    count = counter()
    assert count is not None
    said: list[str] = []
    with training(True, budget=count.live_nbytes + 2_000_000) as (run, model, optimizer):
        run.session.pool._say = said.append
        for i in range(12):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            if i == 8:
                torch.empty(3_000_000, dtype=torch.uint8)
            update(model, optimizer, loss)
        status = status_of(run)
    assert sum("what fell through, took" in line and "above the budget" in line for line in said) == 1
    assert status.deviating == 1


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_an_exception_in_the_middle(where: str) -> None:
    """The step that raised leaves its tensors in the arena for as long as its traceback lives."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise OverflowError("in backward")

    errors: list[BaseException] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch()
        try:
            if i == 8 and where == "forward":
                handle = model[4].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[operator]
                try:
                    model(x)
                finally:
                    handle.remove()
            logits = model(x)
            update(model, optimizer, F.cross_entropy(Fails.apply(logits) if i == 8 and where == "backward" else logits, y))
            if i == 8 and where == "update":
                raise OverflowError("after the update")
        except ArithmeticError as error:
            errors.append(error)  # with its traceback and all tensors of its frames
            optimizer.zero_grad()
        if i == 9:
            errors.clear()

    status = both(step, steps=16)
    assert status.steps >= 8 and 0 < status.deviating < 3 and status.last.fallen == 0


def test_a_thread_that_allocates_meanwhile() -> None:
    stop = threading.Event()
    wrong: list[int] = []

    def work() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            t = torch.full((ROWS * 128,), i % 1000)
            u = t * 2
            if not (torch.equal(t, torch.full_like(t, i % 1000)) and int(u.sum()) == 2 * (i % 1000) * len(t)):
                wrong.append(i)
            stop.wait(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        status = both(steps=60)
    finally:
        stop.set()
        thread.join()
    assert not wrong and status.total.other_threads > 0
    assert status.total.fallen == 0, "what another thread asks for does not move the place of this one"


def test_tensors_that_outlive_their_step() -> None:
    """The loop keeps the logits of each fifth step: their ranges are occupied, and nobody writes to them."""
    kept: list[tuple[Tensor, Tensor]] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        x, y = batch()
        logits = model(x)
        if i % 5 == 0:
            kept.append((logits, logits.detach().to(torch.float64, copy=True)))
        update(model, optimizer, F.cross_entropy(logits, y))

    status = both(step, steps=26)
    assert all(torch.equal(logits.double(), copy) for logits, copy in kept)
    assert status.total.occupied > 0 and status.last.served > 0
    assert arenas_nbytes() > 0
    kept.clear()


def test_the_run_ends_while_tensors_live() -> None:
    with training(True) as (run, model, optimizer):
        for i in range(8):
            plain_step(model, optimizer, i)
        x, y = batch()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        assert status_of(run).addresses is not None
    nbytes = arenas_nbytes()
    assert nbytes > 0
    loss.backward()  # reads activations in the arena, and its own are ordinary ones
    copy = logits.detach().clone()
    torch.empty(100_000).fill_(3.0)
    assert torch.equal(copy, logits) and arenas_nbytes() == nbytes
    optimizer.zero_grad()
    del logits, loss, x, y
    assert arenas_nbytes() == 0


def test_an_evaluation_between_steps() -> None:
    """It is served by the ordinary allocator, with the arena freed; the steps after it are as planned."""
    sizes: list[int] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        if i % 4 == 3:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    x, y = batch(3 * ROWS)
                    F.cross_entropy(model(x), y)
                    sizes.append(arenas_nbytes())
            model.train()
        x, y = batch()
        update(model, optimizer, F.cross_entropy(model(x), y))

    status = both(step, steps=24)
    assert status.deviating == 0 and status.steps > 10
    assert sizes and not any(sizes)


def test_a_forward_without_gradients_in_every_step() -> None:
    """A teacher, which is the model itself: its requests are planned as all others of the step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
        x, _ = batch()
        with torch.no_grad():
            taught = model(x).softmax(1)
        update(model, optimizer, -(taught * model(x).log_softmax(1)).sum(1).mean())

    status = both(step)
    assert status.steps > 3 and status.deviating == status.total.fallen == 0


def test_pause_and_another_model_between_steps() -> None:
    def use(run: Run, model: nn.Module, optimizer: Any, other: nn.Module) -> None:
        for i in range(16):
            if i % 5 == 4:
                with run.pause():
                    model(batch()[0]).sum().backward()
                    optimizer.zero_grad()
                    other(batch()[0]).sum().backward()
            x, y = batch()
            update(model, optimizer, F.cross_entropy(model(x), y))
        run.session.pool.rests()

    with training(True) as (run, model, optimizer):
        use(run, model, optimizer, classifier())
        status = status_of(run)
    assert status.deviating == 0 and status.steps >= 9


def without_allocator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lightning_memopt.native.pool", lambda: None)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("the native allocator, which serves it, is not in place", without_allocator),
        ("the model is on cuda:0", None),
    ],
    ids=["no compiler", "cuda"],
)
def test_where_it_cannot_be_one_line_says_why(
    why: str, change: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    if change is not None:
        change(monkeypatch)
    with training(True) as (run, model, optimizer):
        run.session.pool._say = said.append
        if change is None:
            run.session.pool._device = torch.device("cuda:0")
        for i in range(8):
            plain_step(model, optimizer, i)
        status = status_of(run)
    assert len(said) == 1 and why in said[0] and "goes on with the ordinary allocator" in said[0]
    assert status.steps == 0 and status.reason is not None and status.reason in said[0]
    assert pool_text(status).startswith("none: ")


def test_a_second_run_trains_without_it() -> None:
    with training(True) as (first, model, optimizer), training(True, classifier()) as (second, other, others):
        for i in range(10):
            plain_step(model, optimizer, i)
            plain_step(other, others, i)
        assert status_of(second).reason == "another run has it"
        assert status_of(first).reason is None
    with training(True) as (third, model, optimizer):
        for i in range(8):
            plain_step(model, optimizer, i)
        assert status_of(third).addresses is not None, "the pool of a run that ended is there for the next one"


def test_a_session_that_nobody_closed_leaves_no_window() -> None:
    native = pool()
    assert native is not None
    windows = PoolWindows(native, lambda step, limit: "", print)
    signature = nn.Module()  # any object that lives as long
    windows.begins(signature, 1)
    torch.empty(100)
    assert native.logged == 1
    del windows
    gc.collect()
    torch.empty(100)
    assert native.logged == 1


def test_an_arena_above_the_budget_is_refused() -> None:
    """The loop holds more and more outside of the step: at last the arena does not fit beside it."""
    count = counter()
    assert count is not None
    with training(True, profile_steps=1, on_exceed="warn") as (run, model, optimizer):
        for i in range(3):
            plain_step(model, optimizer, i)
        run.session.budget_nbytes = run.session._limit_nbytes = count.live_nbytes + 10_000
        with pytest.warns(UserWarning, match="above the budget"):
            for i in range(5):
                plain_step(model, optimizer, i)
        reason = status_of(run).reason
    assert reason is not None and "is above the budget of" in reason and "budget=" in reason
