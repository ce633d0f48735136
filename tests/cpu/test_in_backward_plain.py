"""Updates in backward in plain loops: marked last backwards, D5, D7 and what is refused; the smallest plan is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.errors import ConfigError, UpdatesInBackwardError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session.finals import early_in
from tests.cpu.early import OPTIMIZERS, Make, counted
from tests.cpu.fits import assert_same_tree
from tests.cpu.harness import same_bits
from tests.cpu.loops import leaves_nothing, small
from tests.cpu.models import Body, data, made, squares


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return counted(monkeypatch)


def plain(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any], backwards: int = 1) -> None:
    """A loop that marks its last backward."""
    torch.manual_seed(3)
    for batch in data:
        for i in range(backwards):
            loss = squares(model, batch)
            with run.last_backward() if run is not None and i == backwards - 1 else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same_as_plain(
    factory: Callable[[], nn.Module],
    make: Make,
    data: list[Any],
    loop: Callable[..., None] = plain,
    budget: Any = "min",
    mode: str = "always",
) -> Run:
    """The loop without us and with updates in backward: parameters and state to the bit, nothing left on the model."""
    ends = []
    for attach in (False, True):
        model = made(factory)
        optimizer = make(model.parameters())
        options: dict[str, Any] = dict(budget=budget, optimizer_in_backward=mode, profile_steps=1, verbose=False)
        with leaves_nothing(model), optimize(model, optimizer, **options) if attach else contextlib.nullcontext() as run:
            loop(model, run, optimizer, data)
        ends.append([model.state_dict(), optimizer.state_dict()])
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert_same_tree(*ends)
    assert run is not None and run.plan is not None
    return run


WIDE = [data(64, 16, seed=s) for s in range(5)]


def test_f1_accumulation(updates: list[Tensor]) -> None:
    """EXACT: two backwards a step, the last one marked; gradients are summed before anything is updated."""
    run = same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, lambda *a: plain(*a, backwards=2))
    assert len(updates) == 4 * len(list(run.session.model.parameters()))


def test_gradients_end_early_and_peak_is_predicted() -> None:
    """The graph frees each gradient before the next layer's backward; predicted and measured peak agree within 1 %; the peak of
    a model that is mostly parameters falls by most of their gradients, with and without a plan.
    """

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(m for _ in range(6) for m in (nn.Linear(128, 128), nn.Tanh())))

    batches = [data(4, 128, seed=s) for s in range(5)]
    peaks = {}
    for mode in ("never", "always"):
        for budget in ("1GiB", "min"):
            run = same_as_plain(Deep, OPTIMIZERS["adam"], batches, budget=budget, mode=mode)
            state = run.session.main
            assert abs(state.plan.predicted_peak_bytes / state.measured_bytes - 1) < 0.01
            peaks[mode, budget] = state.measured_bytes
            graph = state.program.graph
            gradients = [t for t in graph.tensors if t.kind == "gradient" and t.nbytes == 128 * 128 * 4]
            last = max(op.at for op in graph.ops if op.phase == "backward")
            assert len(gradients) >= 6 and (sum(t.freed_at >= last for t in gradients) <= 1) is (mode == "always")
    weights = 6 * 128 * 128 * 4
    for budget in ("1GiB", "min"):
        assert peaks["always", budget] < peaks["never", budget] - 0.7 * weights


class Detached(Body):
    """D5: the last weight is also read, detached, by the first layers, whose backward comes after its gradient is final."""

    def between(self, h: Tensor, i: int) -> Tensor:
        return h * torch.tanh(self.layers[-1].weight.detach().mean() + h) if i == 0 else h


class Checkpointed(Detached):
    """The same inside of a region that the user's own checkpointing runs again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        first = lambda x: self.between(torch.tanh(self.layers[0](x)).exp(), 0).sin()  # noqa: E731
        x = checkpoint(first, x.requires_grad_(), use_reentrant=self.reentrant)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)).exp().sin()
        return x


class Reentrant(Checkpointed):
    """Tied weights in a nested backward: two gradients in one backward."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


@pytest.mark.parametrize("name", ["sgd", "adamw foreach", "adamw fused"])
@pytest.mark.parametrize("cls", [Detached, Checkpointed, Reentrant])
def test_d5_weight_is_read_after_its_gradient_is_final(cls: type[nn.Module], name: str, updates: list[Tensor]) -> None:
    """EXACT: what reads it in backward keeps its update where it was; what only a rebuild would read it for is kept."""
    run = same_as_plain(cls, OPTIMIZERS[name], WIDE)
    late = run.session._in_backward.late
    assert late == {Detached: set(), Checkpointed: {"layers.2.weight"}, Reentrant: {"layers.0.weight"}}[cls]
    assert len(updates) == 4 * (len(list(run.session.model.parameters())) - len(late))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 1e-2), lambda p: torch.optim.Adagrad(p, 1e-2)])
def test_d7_sparse_gradients(make: Make, updates: list[Tensor]) -> None:
    """EXACT: they are left to the step; dense ones beside them are not."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(32, 16, sparse=True), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.embed((x.abs() * 10).long() % 32))

    run = same_as_plain(Sparse, make, [b[:, 0] for b in WIDE])
    assert run.session._in_backward.late == {"embed.weight"} and len(updates) == 4 * 6


def clipped(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any], scaler: Any = None) -> None:
    for batch in data:
        loss = squares(model, batch)
        with run.last_backward() if run is not None else contextlib.nullcontext():
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def scaled(*args: Any) -> None:
    clipped(*args, scaler=torch.amp.GradScaler("cpu"))


def in_place(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        optimizer.zero_grad(set_to_none=False)
        loss = squares(model, batch)
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
        optimizer.step()


def unmarked(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    plain(model, None, optimizer, data)


def autocast(*args: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain(*args)


def anomaly(*args: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(*args)


LOOPS = {
    "f2": (clipped, "_foreach_norm|linalg_vector_norm"),
    "f3": (scaled, "_amp_foreach_non_finite_check"),
    "f6": (unmarked, "which backward is the last"),
    "f8": (in_place, "set to zero in place"),
    "f9": (autocast, "autocast"),
    "f12": (anomaly, "anomaly"),
}


@pytest.mark.parametrize("id", LOOPS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_plain_loops_that_are_refused(id: str, updates: list[Tensor]) -> None:
    """EXACT with "auto", which leaves updates where they were; REFUSE with "always", before anything is updated in backward."""
    loop, words = LOOPS[id]
    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, loop, mode="auto")
    assert not updates
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", verbose=False)
    with optimize(model, optimizer, **options) as run, pytest.raises(UpdatesInBackwardError, match=words):
        loop(model, run, optimizer, WIDE)
    assert not updates


def test_f6_backward_after_the_last_one() -> None:
    """REFUSE: a gradient for a parameter that is updated already, and a step that never came, are errors, not wrong weights."""
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False)
    with optimize(model, optimizer, **options) as run:
        plain(model, run, optimizer, WIDE[:2])
        for again in (lambda: squares(model, WIDE[1]).backward(), run.last_backward().__enter__):
            loss = squares(model, WIDE[0])
            with run.last_backward():
                loss.backward()
            with pytest.raises(UpdatesInBackwardError, match="already"):
                again()
            optimizer.step()


def test_retained_graph_is_left_to_the_step(updates: list[Tensor]) -> None:
    """EXACT: where autograd keeps the graph, a second backward may follow: nothing is updated before it."""

    def twice(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        for batch in data:
            out = model(batch)
            with run.last_backward() if run is not None else contextlib.nullcontext():
                out.square().sum().backward(retain_graph=True)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    same_as_plain(Body, OPTIMIZERS["sgd"], WIDE, twice, mode="auto")
    assert not updates


def test_f7_exception_in_backward(updates: list[Tensor]) -> None:
    """A backward that raises half-way says how many parameters are updated already; what follows is an ordinary step."""
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        plain(model, run, optimizer, WIDE[:3])
        groups, count = optimizer.param_groups, len(updates)

        def fails(_: Tensor) -> None:
            raise MemoryError("out of memory")

        handle = model.layers[0].bias.register_hook(fails)
        loss = squares(model, WIDE[0])
        with pytest.warns(UserWarning, match="backward raised after 4 of 6"), pytest.raises(MemoryError), run.last_backward():
            loss.backward()
        handle.remove()
        assert len(updates) == count + 4 and optimizer.param_groups is groups
        optimizer.zero_grad()
        plain(model, run, optimizer, WIDE[:1])
        assert len(updates) == count + 10


def test_f10_steps_hooks_rates_and_users_gradient_hooks(updates: list[Tensor]) -> None:
    """A schedule moves once a step, post-hooks of the step are called once, gradient hooks of the user's see the gradient."""
    seen: list[Any] = []

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        norms: list[float] = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = optimizer.register_step_post_hook(lambda *_: norms.append(-1.0))
        hooks = [p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item())) for p in model.parameters()]
        for batch in data:
            plain(model, run, optimizer, [batch])
            schedule.step()
        for hook in [*hooks, handle]:
            hook.remove()
        seen.append((norms, schedule.last_epoch, optimizer.param_groups[0]["lr"]))

    same_as_plain(Body, OPTIMIZERS["adamw"], WIDE, loop)
    assert seen[0] == seen[1] and seen[0][0].count(-1.0) == len(WIDE) and updates


def aside(model: Any, h: Tensor) -> Tensor:
    """A log: it reads neither weights nor what has a gradient."""
    torch.zeros(3).clone().add_(h.detach().mean().clone())
    return h


def looks(model: Any, h: Tensor) -> Tensor:
    """A log of a weight."""
    model.layers[-1].weight.detach().norm()
    return h


def hangs(model: Any, h: Tensor) -> Tensor:
    """A log with a history of its own."""
    h.mean()
    return h


def branch(model: Any, h: Tensor) -> Tensor:
    return h * torch.tanh(model.layers[-1].weight.detach().mean() + h)


def again(model: Any, h: Tensor) -> Tensor:
    """The branch, which runs again in backward, after its weight would have been updated."""
    return checkpoint(lambda h: branch(model, h), h, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", [aside, looks, hangs, branch, again])
@pytest.mark.filterwarnings("ignore:.*left the plan")
def test_forward_that_leaves_its_plan_updates_nothing_early(between: Any, updates: list[Tensor]) -> None:
    """EXACT: who reads what in another forward is not known; that step is an ordinary one. Ops aside change nothing."""

    class Other(Body):
        now = False

        def between(self, h: Tensor, i: int) -> Tensor:
            return between(self, h) if self.now and i == 0 else h  # type: ignore[no-any-return]

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        for i, batch in enumerate(data):
            Other.now = i == 3
            plain(model, run, optimizer, [batch])

    same_as_plain(Other, OPTIMIZERS["sgd"], WIDE, loop)
    assert len(updates) == (4 if between is aside else 3) * 6


def test_given_plan_says_what_is_updated(tmp_path: Path, updates: list[Tensor]) -> None:
    """A plan that was made with updates in backward brings them along, from the first step on."""
    run = same_as_plain(Body, OPTIMIZERS["sgd"], WIDE)
    run.session.save_plan(str(tmp_path / "plan.json"))
    assert len(early_in(run.session.main.program.graph)) >= 5
    updates.clear()
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(plan=tmp_path / "plan.json", optimizer_in_backward="always", verbose=False)
    with optimize(model, optimizer, **options) as given:
        plain(model, given, optimizer, WIDE)
    assert len(updates) >= 5 * len(WIDE)
    reference = made(Body)
    plain(reference, None, OPTIMIZERS["sgd"](reference.parameters()), WIDE)
    assert all(map(same_bits, reference.parameters(), model.parameters()))


def test_options_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="'never', 'auto', 'always'"):
        MemOptConfig(optimizer_in_backward="sometimes")
    with pytest.raises(ConfigError, match="recompute=True"):
        MemOptConfig(optimizer_in_backward="always", recompute=False)
    model = small()
    with pytest.raises(UpdatesInBackwardError, match="2 optimizers"):
        halves = [torch.optim.SGD([p], 0.1) for p in list(model.parameters())[:2]]
        with optimize(model, halves, budget="min", optimizer_in_backward="always"):
            pass
    with optimize(model, halves, budget="min", verbose=False):  # nothing of the refused run is left
        pass
