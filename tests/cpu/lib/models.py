"""Tiny models, and the ways the hazard tests run them: one step under replay, a loop inside `optimize`, a use in its plan."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.runtime import ObservingEngine
from lightning_memopt.session.forward.recording import Recording
from tests.cpu.lib.harness import assert_exact, dropping, outcome, same_bits

Step = Callable[[nn.Module], torch.torch.Tensor]


class Calls(nn.Module):
    """Layers, and how they are called."""

    def __init__(self, call: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, *self.layers)


class Body(nn.Module):
    """A stack of linear layers with activations; subclasses put the hazard into `between`."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = self.between(torch.tanh(layer(x)).exp(), i).sin()
        return x


class Noisy(Body):
    """Saves results of random ops, and results that are made from them."""

    def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
        return (nn.functional.dropout(h, 0.3) + torch.randn_like(h)).exp()


def made(factory: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """A model with the same weights every time."""
    torch.manual_seed(seed)
    return factory()


def data(*size: int, seed: int = 3) -> torch.Tensor:
    """Random numbers that do not touch the global stream."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def verified(model: nn.Module, step: Step, seed: int = 0) -> ObservingEngine:
    """One step that keeps everything and rebuilds all of it once to compare (the first observed steps)."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    engine = ObservingEngine()
    with Recording(engine, engine.make_recorder(), own_mode=True):
        loss = step(model)
    loss.backward()
    return engine


def exact(factory: Callable[[], nn.Module], step: Step, *, drops: bool = True) -> int:
    """A plain step, one with everything dropped and one that verifies: same bits. Returns how many tensors were dropped."""
    plain = outcome(made(factory), step, drop=False)
    rebuilt = outcome(made(factory), step, drop=True)
    assert_exact(plain, rebuilt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "running ... again gave other bits"
        model = made(factory)
        engine = verified(model, step)
    for name, p in model.named_parameters():
        assert same_bits(p.grad, plain.grads[name]), f"gradient of {name} while verifying"
    assert not engine.opaque_ops
    assert not drops or (rebuilt.dropped > 0 and engine.verified), "nothing was dropped: the test tests nothing"
    return rebuilt.dropped


def same_error(step: Callable[[], torch.Tensor], error: type[BaseException] = RuntimeError, match: str = "") -> None:
    """`step` runs forward, does the forbidden, and returns the loss: backward raises the same class plainly and dropped."""
    for drop in (False, True):
        with dropping() if drop else contextlib.nullcontext():
            loss = step()
        try:
            loss.backward()
        except error as e:
            assert match in str(e), str(e)
        else:
            raise AssertionError(f"no error {'under replay' if drop else 'from plain autograd'}")


def stock_is_wrong(factory: Callable[[], nn.Module], step: Callable[[nn.Module, Callable], torch.Tensor]) -> None:
    """torch.utils.checkpoint around the model gives other gradients (or an error): the fixture exercises its hazard."""

    def gradients(call: Callable) -> list[torch.Tensor | None]:
        model = made(factory)
        torch.manual_seed(0)
        step(model, call).backward()
        return [p.grad for p in model.parameters()]

    plain = gradients(lambda model, *args: model(*args))
    try:
        stock = gradients(lambda model, *args: checkpoint(model, *args, use_reentrant=False))
    except RuntimeError:
        return
    assert not all(same_bits(a, b) for a, b in zip(plain, stock, strict=True))


X = data(8, 16)
W = data(16, 16, seed=4)
CHANGED = "modified by an inplace operation"
BATCHES = [data(128, 16, seed=s) for s in range(4)]


class Layer(nn.Module):
    """One weight and a function of (x, w) that a test supplies."""

    def __init__(self, f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(W.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x, self.w)


def leaf() -> torch.Tensor:
    return W.clone().requires_grad_()


def exact_f(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, drops: bool = True) -> None:
    """`exact` of `f(x, w)`, summed to a loss."""
    exact(lambda: Layer(f), lambda m: m(X).abs().square().sum(), drops=drops)


def exact_everywhere(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, drops: bool = True) -> None:
    """`exact_f`, and the same bits of a loop inside `optimize`."""
    exact_f(f, drops=drops)
    trains(lambda: Layer(f), [X] * 3, drops=False)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = squares,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.Tensor:
    """A plain loop; returns the generator's next draw."""
    optimizer = optimizer or sgd(model)
    torch.manual_seed(7)
    for batch in batches:
        optimizer.zero_grad()
        backward(loss(model, batch))
        optimizer.step()
    return torch.rand(4)


def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[Run]:
    """The smallest plan after one observed step."""
    return optimize(model, optimizer, budget="min", profile_steps=1, verbose=False)


def assert_drops(run: Run) -> None:
    assert run.plan is not None and any(life.how == "rebuild" for life in run.plan.lives), "the plan drops nothing"


def trains(
    factory: Callable[[], nn.Module],
    batches: Sequence[torch.Tensor] | None = None,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = squares,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    *,
    drops: bool = True,
) -> Run:
    """The loop plainly and inside `optimize` at the smallest plan: same parameters, buffers and stream."""
    batches = batches if batches is not None else [data(256, 16, seed=s) for s in range(4)]
    plain = made(factory)
    untouched = copy.deepcopy(plain.state_dict())
    draw = train(plain, batches, loss, backward)
    planned = made(factory)
    optimizer = sgd(planned)
    with attached(planned, optimizer) as run:
        assert same_bits(train(planned, batches, loss, backward, optimizer), draw), "state of the generator"
    for name, value in plain.state_dict().items():
        assert same_bits(planned.state_dict()[name], value), name
    assert any(not same_bits(value, untouched[name]) for name, value in plain.state_dict().items()), "nothing was trained"
    if drops:
        assert_drops(run)
    return run


@contextlib.contextmanager
def in_plan(
    factory: Callable[[], nn.Module] = Body, *, attach: bool = True
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model and its optimizer after two steps, with a plan in force that drops something; or after two plain steps."""
    model = made(factory)
    optimizer = sgd(model)
    with attached(model, optimizer) if attach else contextlib.nullcontext() as run:
        train(model, BATCHES[:2], optimizer=optimizer)
        if run is not None:
            assert_drops(run)
        model.zero_grad()
        yield model, optimizer


Tensors = Sequence[torch.Tensor | None]


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def same_when_dropped(use: Callable[[nn.Module, Callable], Tensors], factory: Callable[[], nn.Module] = Body) -> None:
    """`use(model, recording)` plainly and with everything dropped gives the same tensors."""
    plain, dropped = (use(made(factory), recording) for recording in (contextlib.nullcontext, dropping))
    assert same(plain, dropped)


def planned(use: Callable[[nn.Module], Tensors], factory: Callable[[], nn.Module] = Body) -> None:
    """`use(model)` plainly and in a planned step gives the same tensors."""
    results = []
    for attach in (False, True):
        with in_plan(factory, attach=attach) as (model, _):
            results.append(use(model))
    assert same(*results)
