"""Loops that write, replace or move frozen weights while they are parked, and modules that return more than tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils import swap_tensors
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize, to_device
from lightning_memopt.runtime.tiers.shelf import AWAY, is_away
from tests.cpu.lib.engines import elements, needs_native
from tests.cpu.lib.parked import parked_of
from tests.cpu.lib.said import listening

pytestmark = needs_native  # without it weights are not parked, and a line says so

WIDTH = 32


def layers(n: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n))).requires_grad_(False)


# -- writes and replaced memory ----------------------------------------------------------------------


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 0.5


def by_data(weight: Tensor) -> None:
    weight.data.mul_(0.5)


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_a_write_in_the_module_that_no_version_counts(write: Callable[[Tensor], None]) -> None:
    class Shrinking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            write(self.weight)
            return super().forward(x)

    model = nn.Sequential(Shrinking(WIDTH, WIDTH)).requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    with parked_of(model):
        for _ in range(3):
            assert torch.equal(model(x), plain(x)) and is_away(model[0].weight)
    assert torch.equal(model[0].weight, plain[0].weight)


def shared(model: nn.Sequential) -> None:
    model.share_memory()


def resized(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(p.nbytes + 64)


def given_data(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def swapped(model: nn.Sequential) -> None:
    for p in list(model.parameters()):
        swap_tensors(p, nn.Parameter(p * 0.5, requires_grad=False))


def of_another_type(model: nn.Sequential) -> None:
    model.double()


@pytest.mark.parametrize("change", [shared, resized, given_data, swapped, of_another_type])
@pytest.mark.parametrize("inside", [False, True])
def test_weights_with_other_memory(change: Callable[[nn.Sequential], None], inside: bool) -> None:
    """Whatever the loop does to the memory of a weight that is away, or to one that is on the device, stays done."""
    model = layers()
    plain, x = copy.deepcopy(model), torch.randn(4, WIDTH)

    def changing(layer: nn.Module, args: Any) -> Any:
        change(model if layer is model[1] else plain)
        return args[0].to(layer.weight.dtype)

    with parked_of(model):
        for each in (model, plain):
            if inside:
                handle = each[1].register_forward_pre_hook(changing)
                each[1](x)
                handle.remove()
            else:
                change(each)
        x = x.to(plain[0].weight.dtype)
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x)) and elements(model.parameters()) == elements(plain.parameters())
    assert [p.is_shared() for p in model.parameters()] == [p.is_shared() for p in plain.parameters()]
    assert not any(is_away(p) for p in model.parameters())


# -- what a module returns ---------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    itself: Any = None


def fetched(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes that come in a forward and in its backward."""
    with parked_of(model) as parked:
        out = model(x)
        forward = parked.moved_nbytes
        (out if isinstance(out, Tensor) else out.hidden).sum().backward()
        return forward, parked.moved_nbytes - forward


def test_weights_come_before_backward_of_a_module_that_returns_a_dataclass() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            out = Output(super().forward(x.hidden if isinstance(x, Output) else x))
            out.itself = out
            return out

    model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(3))).requires_grad_(False)
    forward, backward = fetched(model, torch.randn(4, WIDTH, requires_grad=True))
    assert forward == backward == sum(p.nbytes for p in model.parameters())


def test_a_tensor_that_a_module_returns_as_it_was_brings_no_weights() -> None:
    """As the position bias of T5, which the first block makes, and all others return."""

    class Layer(nn.Linear):
        def forward(self, given: Any) -> Any:
            x, bias = given
            bias = x.tanh() if bias is None else bias
            return super().forward(x) + bias, bias

    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x, None))[0]

    model = Layers(*(Layer(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
    forward, backward = fetched(model, torch.randn(4, WIDTH, requires_grad=True))
    assert forward == backward == sum(p.nbytes for p in model.parameters())


def test_a_module_that_a_checkpoint_runs_again_is_there_alone() -> None:
    """Its weights come once for its second forward and its backward, and those of the module behind it go first."""
    model = layers()
    seen: list[list[int]] = []
    x = torch.randn(4, WIDTH, requires_grad=True)
    with parked_of(model) as parked:
        for layer in model:
            layer.register_forward_hook(lambda *_: seen.append([i for i, each in enumerate(model) if not is_away(each.weight)]))
        out = x
        for layer in model:
            out = checkpoint(layer, out, use_reentrant=True)
        out.sum().backward()
        assert seen == [[0], [1], [2], [2], [1], [0]] and all(is_away(p) for p in model.parameters())
        assert parked.moved_nbytes == 2 * sum(p.nbytes for p in model.parameters())


# -- in a run ----------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).relu() * self.scale


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("scale"))
    return model


def train(budget: Any, meanwhile: Callable[[nn.Sequential], object], model: nn.Sequential, steps: int = 6) -> Any:
    """The losses, the weights, and which bases were away after each step."""
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": "never", "budget": budget}
    losses, away = [], []
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, **options):
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            away.append([is_away(block.base.weight) for block in model])
            optimizer.step()
            losses.append(loss.item())
            if step == 3:
                meanwhile(model)
    return losses, elements([p.detach() for p in model.parameters()]), away


def other_module(model: nn.Sequential) -> None:
    model[0].base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def other_weight(model: nn.Sequential) -> None:
    model[0].base.weight = nn.Parameter(model[0].base.weight * 0.5, requires_grad=False)


def other_data(model: nn.Sequential) -> None:
    model[0].base.weight.data = model[0].base.weight * 0.5


@pytest.mark.parametrize("change", [other_module, other_weight, other_data])
def test_what_the_loop_puts_in_the_place_of_a_parked_weight_is_parked(change: Callable[[nn.Sequential], None]) -> None:
    plain, parked = (train(budget, change, adapted()) for budget in (None, "min"))
    assert plain[:2] == parked[:2]
    assert parked[2][3] == [True] * 4 and parked[2][-1] == [True] * 4


def test_a_line_says_which_frozen_weights_stay() -> None:
    """Two blocks call one module; two weights are parts of a larger tensor."""
    model = adapted()
    model[1].base = model[0].base
    flat = torch.zeros(2, WIDTH, WIDTH)
    for block, part in zip(model[2:], flat, strict=True):
        block.base.weight.data = part
    with listening() as said:
        train("min", lambda model: None, model)
        text = said.taken()
    assert "weights stay on the device (4.12 KiB): their modules do not run once in the forward (0.base)" in text
    assert "weights stay on the device (8.00 KiB): other tensors or processes have their memory, too" in text


def test_weights_that_the_step_writes_through_data_stay() -> None:
    """No version counter counts such writes, and off the CPU nothing else could see a later one."""

    class Decaying(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.99)
            return super().forward(x)

    def trained(parks: bool) -> tuple[list[bytes], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), Decaying(64, 64), nn.Linear(64, 64))
        for layer in model:
            layer.weight.requires_grad_(False)
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad])
        options = {"budget": "min", "offload": "disk", "max_slowdown": 1e6}
        with optimize(model, optimizer, **options) if parks else contextlib.nullcontext() as run:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
            plan = run.plan if parks else None
        return elements(p.detach() for p in model.parameters()), plan

    with listening() as said:
        bits, plan = trained(True)
        text = said.taken()
    assert bits == trained(False)[0]
    assert {unit.module for unit in plan.weights} == {"0", "1", "2", "4"}
    assert "the step writes weights of their modules (3)" in text


def test_a_model_that_was_let_go_leaves_no_weights_in_the_tier() -> None:
    """As soon as another model is watched, and Python has collected."""
    before = len(AWAY)
    model = to_device(layers(), "cpu")
    assert len(AWAY) == before + 6
    del model
    with parked_of(layers(1)):
        gc.collect()
        assert len(AWAY) == before + 2
