"""Updates in backward in plain loops that go another way: refused by name, or left to the step (F2, F3, F6 to F9, F12)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.errors import ConfigError, UpdatesInBackwardError
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.early import OPTIMIZERS, WIDE, plain, same_as_plain
from tests.cpu.lib.loops import leaves_nothing, small
from tests.cpu.lib.models import Body, made, squares


def looking(look: Callable[[nn.Module], Any], scaler: Any = None) -> Callable[..., None]:
    """A loop that calls `look` between backward and the step, and leaves the step out where that says False."""

    def loop(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        for batch in data:
            loss = squares(model, batch)
            with run.last_backward() if run is not None else contextlib.nullcontext():
                (scaler.scale(loss) if scaler else loss).backward()
            if look(model) is not False:
                scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()

    return loop


def scaled(*args: Any) -> None:
    looking(lambda model: None, torch.amp.GradScaler("cpu"))(*args)


def norms(model: nn.Module) -> list[float]:
    return [p.grad.norm().item() for p in model.parameters() if p.grad is not None]


def sharpness_aware(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    """SAM: the gradient of weights that were moved along their gradient, and are moved back before the step."""
    for batch in data:
        squares(model, batch).backward()
        with torch.no_grad():
            moved = [(p, 1e-3 * p.grad) for p in model.parameters() if p.grad is not None]
            for p, by in moved:
                p.add_(by)
        optimizer.zero_grad()
        loss = squares(model, batch)
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def in_place(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        optimizer.zero_grad(set_to_none=False)
        loss = squares(model, batch)
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
        optimizer.step()


def closure(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    def forward_and_backward() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, batch)
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
        return loss

    for batch in data:  # noqa: B007
        optimizer.step(forward_and_backward)


def unmarked(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    plain(model, None, optimizer, data)


def before_the_forward(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        with run.last_backward() if run is not None else contextlib.nullcontext():
            squares(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast(*args: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain(*args)


def anomaly(*args: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(*args)


LOOKS = "reads gradients or weights between backward and optimizer.step"
LOOPS = {
    "f2": (looking(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)), "_foreach_norm|linalg_vector_norm"),
    "f2 by value": (looking(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.1)), "_foreach_clamp"),
    "f3": (scaled, "_amp_foreach_non_finite_check"),
    "f6": (unmarked, "which backward is the last"),
    "f6 before": (before_the_forward, "before the forward"),
    "f8": (in_place, "set to zero in place"),
    "f8 norms": (looking(norms), LOOKS),
    "f9": (autocast, "autocast"),
    "f9 closure": (closure, "closure"),
    "f9 SAM": (sharpness_aware, LOOKS),
    "f12": (anomaly, "anomaly"),
    "f12 guard": (looking(lambda model: norms(model)[2] > 1e-3), LOOKS),
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


def test_an_interrupt_while_hooks_are_registered_leaves_none(monkeypatch: pytest.MonkeyPatch, updates: list[Tensor]) -> None:
    """Ctrl-C may come when torch has registered a hook, before anybody has a handle of it: the next step is an ordinary one."""
    model = made(Body)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        plain(model, run, optimizer, WIDE[:3])
        count = len(updates)
        register, registered = torch.Tensor.register_post_accumulate_grad_hook, list[Tensor]()

        def interrupted(p: Tensor, hook: Any) -> None:
            register(p, hook)
            registered.append(p)
            if len(registered) == 3:
                raise KeyboardInterrupt

        loss = squares(model, WIDE[0])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", interrupted)
            with pytest.raises(KeyboardInterrupt), run.last_backward():
                loss.backward()
        assert len(registered) == 3
        registered.clear()
        del loss
        optimizer.zero_grad()
        squares(model, WIDE[1]).backward()  # the first of several that accumulate
        assert len(updates) == count
        optimizer.zero_grad()
        plain(model, run, optimizer, WIDE[:1])
        assert len(updates) == count + 6


@pytest.mark.parametrize("interrupted", (0, 1, 3), ids=("the observed step", "the second step", "a planned step"))
def test_a_step_that_is_given_up_after_backward_teaches_nothing(interrupted: int, updates: list[Tensor]) -> None:
    """Ctrl-C comes between backward and `optimizer.step()`. The loop goes on from a checkpoint, and clears gradients."""
    model = made(Body)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=2, verbose=False)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        plain(model, run, optimizer, WIDE[:interrupted])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        loss = squares(model, WIDE[0])
        with run.last_backward():
            loss.backward()
        del loss
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        count = len(updates)
        plain(model, run, optimizer, WIDE[:4])
        assert len(updates) >= count + 6


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


@pytest.mark.filterwarnings("ignore:.*left the plan")
def test_an_update_that_raises_teaches_nothing(updates: list[Tensor]) -> None:
    """A hook of the optimizer raises after the update of an observed step, the loop goes on from a checkpoint, and the forward
    of the next step leaves its plan. A later step that is observed finds that nobody touches weights.
    """

    class Other(Body):
        now = False

        def between(self, h: Tensor, i: int) -> Tensor:
            return branch(self, h) if self.now and i == 0 else h

    def raises(*_: Any) -> None:
        raise MemoryError("no memory for a log")

    larger = [torch.cat((x, x)) for x in WIDE[:3]]
    model = made(Other)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False)
    with leaves_nothing(model), optimize(model, optimizer, **options) as run:
        plain(model, run, optimizer, WIDE[:3])
        assert updates
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        hooks = optimizer._optimizer_step_post_hooks
        handle = optimizer.register_step_post_hook(raises)
        hooks.move_to_end(handle.id, last=False)  # before the run's own
        with pytest.raises(MemoryError):
            plain(model, run, optimizer, larger[:1])
        handle.remove()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        Other.now = True
        plain(model, run, optimizer, WIDE[:1])
        Other.now = False
        count = len(updates)
        plain(model, run, optimizer, larger)
        assert len(updates) >= count + 6


def test_options_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="'never', 'auto', 'always'"):
        MemOptConfig(optimizer_in_backward="sometimes")
    model = small()
    with pytest.raises(UpdatesInBackwardError, match="2 optimizers"):
        halves = [torch.optim.SGD([p], 0.1) for p in list(model.parameters())[:2]]
        with optimize(model, halves, budget="min", optimizer_in_backward="always"):
            pass
    with optimize(model, halves, budget="min", verbose=False):  # nothing of the refused run is left
        pass


def test_where_nothing_is_updated_early_plans_are_the_usual_ones() -> None:
    """The loop marks no backward. It frees gradients before each backward, and they are not planned for any longer."""

    def peak(mode: str) -> int:
        model = made(Body)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with optimize(model, optimizer, budget="min", optimizer_in_backward=mode, verbose=False) as run:
            for x in WIDE:
                loss = squares(model, x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert run.plan is not None
            return run.plan.predicted.needed_nbytes

    assert peak("auto") == peak("never")
