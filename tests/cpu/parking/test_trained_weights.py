"""Loops that read, write, replace or share trained weights, which are in a tier while their module does not run.

Losses, weights and optimizer state are those of the plain run, bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import gelu
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.tiers.shelf import AWAY, is_away
from tests.cpu.lib.engines import elements, needs_fork
from tests.cpu.lib.parked import parked_of
from tests.cpu.lib.times import Known, given

WIDTH, STEPS = 64, 8


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    given(monkeypatch, Known())
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: weights are not parked, and a line says so")
    yield
    gc.collect()
    assert not AWAY


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def batch() -> Tensor:
    return torch.randn(16, WIDTH)


class Loop:
    """One step, of which a test replaces parts. `kept`: what the loop keeps from step to step."""

    def __init__(self, model: Model, optimizer: optim.Optimizer, run: Any, early: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.run, self.early = run, early
        self.kept: dict[str, Any] = {}

    def step(self, i: int, before_backward: Callable[[], object] = int, before_update: Callable[[], object] = int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch()).square().mean()
        before_backward()
        with self.run.last_backward() if self.early and self.run is not None else contextlib.nullcontext():
            loss.backward()
        before_update()
        self.optimizer.step()
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


Step = Callable[[Loop, int], Any]


class Trained:
    """The bits of a run, and the modules whose weights its plans parked."""

    def __init__(
        self,
        step: Step,
        in_backward: str | None,
        model: Callable[[], Model] = Model,
        optimizer: Callable[[Any], optim.Optimizer] = optim.AdamW,
        recompute: bool = True,
    ) -> None:
        torch.manual_seed(0)
        built = model()
        updates = optimizer(built.parameters())
        options = {"budget": "min", "offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": in_backward}
        options["recompute"] = recompute
        self.losses: list[Any] = []
        self.units: set[str] = set()
        with optimize(built, updates, **options) if in_backward else contextlib.nullcontext() as run:
            loop = Loop(built, updates, run, in_backward == "always")
            for i in range(STEPS):
                torch.manual_seed(100 + i)
                loss = step(loop, i)
                self.losses.append(loss.item() if isinstance(loss, Tensor) else loss)
                if run is not None and run.plan is not None:
                    self.units |= {unit.module for unit in run.plan.weights}
        state = [t for each in updates.state.values() for t in each.values()]
        self.bits = elements(t.detach() for t in (*built.parameters(), *state))
        self.parameters = loop.parameters
        assert not any(map(is_away, self.parameters))


def same(step: Step, in_backward: str = "never", **kinds: Any) -> Trained:
    """The run with parked weights, which has the bits of the plain one."""
    plain, parked = Trained(step, None, **kinds), Trained(step, in_backward, **kinds)
    assert parked.losses == plain.losses and parked.bits == plain.bits
    return parked


# -- between steps -----------------------------------------------------------------------------------


def averages(loop: Loop, i: int) -> Any:
    loss = loop.step(i)
    average = loop.kept.setdefault("average", copy.deepcopy(loop.model))
    swa = loop.kept.setdefault("swa", swa_utils.AveragedModel(loop.model))
    swa.update_parameters(loop.model)
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), loop.parameters, 0.1)
    return loss.item(), elements(p.detach() for each in (average, swa.module) for p in each.parameters())


def swaps_averages(loop: Loop, i: int) -> Any:
    """The model is evaluated with average weights, instead of its own."""
    loss = loop.step(i).item()
    average = loop.kept.setdefault("average", [p.detach().clone() for p in loop.parameters])
    for _ in range(2):
        for mean, p in zip(average, loop.parameters, strict=True):
            p.data, mean.data = mean.data, p.data
        with torch.inference_mode():
            loss += loop.model.eval()(batch()).sum().item()
        loop.model.train()
    for mean, p in zip(average, loop.parameters, strict=True):
        mean.lerp_(p.detach(), 0.2)
    return loss


def looks_ahead(loop: Loop, i: int) -> Any:
    loss = loop.step(i)
    slow = loop.kept.setdefault("slow", [p.detach().clone() for p in loop.parameters])
    if i % 3 == 2:
        for mean, p in zip(slow, loop.parameters, strict=True):
            p.data.copy_(mean.lerp_(p.detach(), 0.5))
    return loss


def clips(loop: Loop, i: int) -> Any:
    loss = loop.step(i)
    for p in loop.parameters:
        p.data.clamp_(-0.05, 0.05)
    return loss


def goes_back(loop: Loop, i: int) -> Any:
    loss = loop.step(i)
    if i == 4:
        loop.kept["checkpoint"] = pickle.dumps((loop.model.state_dict(), loop.optimizer.state_dict()))
    if i == 6:
        weights, state = pickle.loads(loop.kept["checkpoint"])
        loop.model.load_state_dict(weights)
        loop.optimizer.load_state_dict(state)
    return loss


def freezes(loop: Loop, i: int) -> Any:
    """In turn, as a GAN."""
    for k, block in enumerate(loop.model.blocks):
        block.requires_grad_((i + k) % 2 == 0)
    return loop.step(i)


def through_views(loop: Loop, i: int) -> Any:
    views = loop.kept.setdefault("views", [p.detach().view(-1) for p in loop.parameters])
    loss = loop.step(i)
    torch._foreach_clamp_max_(views, 0.1)
    return loss


BETWEEN: list[Step] = [averages, swaps_averages, looks_ahead, clips, goes_back, freezes, through_views]


@pytest.mark.parametrize("in_backward", ["never", "always"])
@pytest.mark.parametrize("step", BETWEEN)
def test_the_loop_reads_and_writes_weights_between_steps(step: Step, in_backward: str) -> None:
    assert len(same(step, in_backward).units) == 6


# -- within a step -----------------------------------------------------------------------------------


def clips_in_backward(loop: Loop, i: int) -> Any:
    """From a late step on, where no plan knows of it, and by `.data`, which no version counter shows."""
    if i == 5:
        for p in loop.parameters:
            p.register_post_accumulate_grad_hook(lambda p: (p.data.clamp_(-0.05, 0.05), None)[1])
    return loop.step(i)


def clips_in_forward(loop: Loop, i: int) -> Any:
    if i == 5:
        for block in loop.model.blocks:
            block.register_forward_hook(lambda block, *_: [p.data.clamp_(-0.05, 0.05) for p in block.parameters()] and None)
    return loop.step(i)


def writes_before_backward(loop: Loop, i: int) -> Any:
    return loop.step(i, lambda: [p.data.mul_(0.9) for p in loop.parameters] if i > 4 else None)


def fails_in_backward(loop: Loop, i: int) -> Any:
    """Then it writes weights, and goes backward again."""

    def before_backward() -> None:
        if i < 5:
            return
        handle = loop.model.blocks[1].down.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.model(batch()).sum().backward()
        for p in loop.parameters:
            p.data.mul_(0.99)
        handle.remove()
        loop.optimizer.zero_grad()

    return loop.step(i, before_backward)


def fails_in_forward(loop: Loop, i: int) -> Any:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    if i > 4:
        handle = loop.model.blocks[2].dropout.register_forward_pre_hook(fails)
        with pytest.raises(ZeroDivisionError):
            loop.model(batch())
        handle.remove()
    return loop.step(i)


def calls_parts(loop: Loop, i: int) -> Any:
    """Of the forward, backward and the update, some read weights of modules that do not run."""
    loss = loop.step(i)
    with torch.no_grad():
        h = loop.model.blocks[0].up(loop.model.first(batch()))
    part = loop.model.blocks[1].down(h).mean()
    (gradient,) = torch.autograd.grad(part, loop.model.blocks[1].down.weight)
    weights = {name: p.detach() * 1.01 for name, p in loop.model.named_parameters()}
    called = torch.func.functional_call(loop.model, weights, (batch(),))
    return loss.item(), part.item(), gradient.sum().item(), called.sum().item()


def with_a_stranger(loop: Loop, i: int) -> Any:
    """Another optimizer, with a fused kernel, updates a block, too."""
    other = loop.kept.setdefault("other", optim.SGD(loop.model.blocks[0].parameters(), lr=0.01, fused=True))
    loss = loop.step(i)
    other.step()
    return loss


WITHIN: list[Step] = [
    clips_in_backward,
    clips_in_forward,
    fails_in_forward,
    calls_parts,
    with_a_stranger,
]


@pytest.mark.parametrize("step", WITHIN)
def test_the_loop_does_more_in_a_step(step: Step) -> None:
    assert len(same(step).units) == 6


@pytest.mark.parametrize("step", [writes_before_backward, fails_in_backward])
def test_the_loop_writes_weights_between_forward_and_backward(step: Step) -> None:
    """Without rebuilds, which would read what no observed step has written (docs/not_rebuilt.md, "What is not seen")."""
    assert len(same(step, recompute=False).units) == 6


def fused(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("in_backward", ["never", "always"])
@pytest.mark.parametrize(
    ("optimizer", "reentrant"), [(fused, None), (optim.Adafactor, None), (optim.SGD, False), (optim.SGD, True)]
)
def test_optimizers_and_checkpoints(in_backward: str, optimizer: Any, reentrant: bool | None) -> None:
    kinds = {"model": lambda: Model(reentrant), "optimizer": optimizer}
    assert same(Loop.step, in_backward, **kinds).units


# -- processes and threads -----------------------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("trains", [False, True])
def test_a_forked_process_has_weights_of_its_own(trains: bool) -> None:
    """It reads them after its parent has written others, or trains on with the run that it has got."""

    def step(loop: Loop, i: int) -> Any:
        if i != 5:
            return loop.step(i)
        (told, tell), (goes, go) = os.pipe(), os.pipe()
        before = elements(p.detach().clone() for p in loop.parameters)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                if trains:
                    [loop.step(k) for k in range(3)]
                os.write(tell, b".")
                os.read(goes, 1)
                code = int(not trains and elements(p.detach().clone() for p in loop.parameters) != before)
            os._exit(code)
        os.read(told, 1)
        loss = loop.step(i)
        os.write(go, b".")
        assert os.waitpid(child, 0)[1] == 0
        for end in (told, tell, goes, go):
            os.close(end)
        return loss

    assert len(same(step).units) == 6


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_that_evaluates_takes_no_weight_from_a_step() -> None:
    """Not from an update, nor from a backward. It would free what a kernel of the step reads, and lose what it writes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x, seen = batch(), list[list[bool]]()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    def look(*_: Any) -> None:
        in_a_thread(evaluate)
        seen.append([is_away(layer.weight) for layer in model])

    with parked_of(model) as parked:
        parked.copy_ahead(())
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        with parked.there([model[0].weight]):
            look()
            model[0].weight.data.add_(1)
        assert is_away(model[0].weight)
        h = model[0](x)
        h.register_hook(look)
        model[1](h).sum().backward()
        assert seen == [[False, True], [True, False]] and is_away(model[1].weight)


class PostNorm(nn.Module):
    """Blocks that end in a norm, which saves what it has made only when the next block runs. A head with modules in it."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Module()
        self.head.norm, self.head.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.scale = nn.Parameter(torch.ones(256))
        self.head.forward = self._head  # type: ignore[method-assign]

    def _head(self, x: Tensor) -> Tensor:
        return self.head.out(gelu(self.head.norm(x))) * self.head.scale[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("in_backward", ["never", "always"])
def test_all_blocks_are_parked(in_backward: str) -> None:
    """Also those that a saved result, or a module around others, seems to run twice in backward; and bytes are as predicted."""
    gc.collect()

    def train(budget: Any) -> tuple[list[bytes], Any]:
        torch.manual_seed(0)
        model = PostNorm()
        optimizer = optim.AdamW(model.parameters())
        options = {"offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": in_backward}
        with optimize(model, optimizer, budget=budget, **options) if budget else contextlib.nullcontext() as run:
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8, WIDTH)).square().mean()
                with run.last_backward() if run is not None and in_backward == "always" else contextlib.nullcontext():
                    loss.backward()
                optimizer.step()
            status = None if run is None else run.status()
        return elements(p.detach() for p in model.parameters()), status

    plain, _ = train(None)
    found, status = train("min")
    assert found == plain
    assert {f"blocks.{i}" for i in range(4)} < {unit.module for unit in status.plan.weights if unit.are_trained}
    hidden_nbytes = 4 * 8 * WIDTH * 4  # may be freed a moment earlier than in observed steps
    assert 0 <= status.predicted_peak_nbytes - status.measured_peak_nbytes <= 4096 + hidden_nbytes
