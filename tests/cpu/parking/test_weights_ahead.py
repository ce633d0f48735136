"""Frozen weights that are copied ahead, while the module before theirs computes. The CPU is told that it can do both."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import LoweringError, WeightParking, lower
from lightning_memopt.plan.files import read_plan, write_plan
from lightning_memopt.plan.validate import validate
from lightning_memopt.runtime import install_native, parked_weights
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.runtime.weight_memory import WeightMemory
from lightning_memopt.session import at_rest
from lightning_memopt.solvers import parking
from tests.cpu.lib.engines import elements
from tests.cpu.lib.parked import parked_of
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_weights import MIB, Block, Model, Trained


@pytest.fixture(autouse=True)
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: frozen weights are not parked, and a line says so")
    for module in (parked_weights, at_rest):
        monkeypatch.setattr(module, "copies_overlap", lambda device: True)


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).requires_grad_(False)


def in_order(model: nn.Sequential) -> list[WeightParking]:
    """Each layer is copied while the one before it computes: in the forward the one below, in backward the one above."""
    paths = ["", *(path for path, _ in model.named_children()), ""]
    return [
        WeightParking(
            module=path,
            tier="disk",
            nbytes=1,
            tier_nbytes=4096,
            beside=(paths[i], paths[i + 2]),
            moved_nbytes=2,
            copy_seconds=0.0,
            seconds=0.0,
        )
        for i, path in enumerate(paths[1:-1])
    ]


def coming(parked: Any) -> list[str]:
    """The modules whose weights have memory that is yet to be theirs."""
    return [path for path, unit in parked._units.items() if any(weight._coming is not None for weight in unit._weights)]


def test_the_next_module_is_copied_while_one_computes(layers: nn.Sequential) -> None:
    """In forward and backward, evaluation, a forward that ends early, and after an error. A weight that comes is away."""
    plain = copy.deepcopy(layers)
    seen: list[tuple[list[int], list[str]]] = []

    def look(*_: Any) -> None:
        seen.append(([i for i, layer in enumerate(layers) if not is_away(layer.weight)], coming(parked)))

    with parked_of(layers) as parked:
        parked.copy_ahead(in_order(layers))
        for layer in layers:
            layer.register_forward_hook(look)
        x = torch.randn(4, 32, requires_grad=True)
        out = layers(x)
        assert seen == [([0], ["1"]), ([1], ["2"]), ([2], ["3"]), ([3], [])]
        seen.clear()
        out.grad_fn.register_hook(look)
        out.sum().backward()
        assert seen == [([3], ["2"])] and not coming(parked) and all(is_away(layer.weight) for layer in layers)
        assert parked.moved_nbytes == 2 * sum(p.nbytes for p in layers.parameters())
        with torch.no_grad():
            assert torch.equal(layers[1](layers[0](x)), plain[1](plain[0](x))) and coming(parked) == ["2"]
            assert torch.equal(layers(x), plain(x)) and not coming(parked)
        broken = layers(x)
        broken.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            broken.sum().backward()
        layers[0](x)
    grad = x.grad.clone()
    x.grad = None
    plain(x).sum().backward()
    assert torch.equal(grad, x.grad) and elements(layers.parameters()) == elements(plain.parameters())
    assert not coming(parked) and not any(is_away(p) for p in layers.parameters())


def test_a_weight_that_is_written_while_it_comes_is_copied_again(layers: nn.Sequential) -> None:
    """`W2`."""
    plain = copy.deepcopy(layers)

    def writes(model: nn.Sequential) -> Any:
        def write(*_: Any) -> None:
            with torch.no_grad():
                model[1].weight.mul_(0.9)

        return write

    with parked_of(layers) as parked:
        parked.copy_ahead(in_order(layers))
        for model in (layers, plain):
            model[0].register_forward_hook(writes(model))
        for _ in range(3):
            x = torch.randn(4, 32)
            assert torch.equal(layers(x), plain(x))
    assert elements(layers.parameters()) == elements(plain.parameters())


def test_a_backward_that_raises_leaves_no_copy_and_no_second_module(layers: nn.Sequential) -> None:
    """Not even a copy of a weight that is written afterwards by `.data`, which moves no version counter."""
    plain = copy.deepcopy(layers)
    there: list[list[int]] = []
    x = torch.randn(4, 32, requires_grad=True)
    with parked_of(layers) as parked:
        parked.copy_ahead(in_order(layers))
        first = layers[0](x)
        first.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layers[3](layers[2](layers[1](first))).sum().backward()
        assert not coming(parked) and all(is_away(layer.weight) for layer in layers)
        for model in (layers, plain):
            model[0].weight.data.mul_(0.9)
        hook = layers[0].register_forward_hook(
            lambda *_: there.append([i for i, layer in enumerate(layers) if not is_away(layer.weight)])
        )
        assert torch.equal(layers(x), plain(x)) and there == [[0]]
        hook.remove()


def test_without_room_a_weight_is_copied_when_it_is_needed(layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = copy.deepcopy(layers)

    def full(self: Any) -> None:
        raise torch.OutOfMemoryError("full")

    with parked_of(layers) as parked:
        parked.copy_ahead(in_order(layers))
        monkeypatch.setattr(WeightMemory, "take_memory", full)
        x = torch.randn(4, 32)
        assert torch.equal(layers(x), plain(x)) and not coming(parked)


@pytest.mark.parametrize("what", ["take_memory", "copy_ahead", "fetch", "stop"])
def test_an_interrupt_at_any_copy_loses_nothing(what: str, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = elements(layers.parameters())
    original = getattr(WeightMemory, what)
    for k in range(1, 14):
        left = [k]

        def interrupted(self: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            original(self)

        with parked_of(layers) as parked:
            parked.copy_ahead(in_order(layers))
            monkeypatch.setattr(WeightMemory, what, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                layers(torch.randn(2, 32, requires_grad=True)).sum().backward()
            monkeypatch.setattr(WeightMemory, what, original)
            layers(torch.randn(2, 32, requires_grad=True)).sum().backward()
        assert elements(layers.parameters()) == plain and not any(is_away(p) for p in layers.parameters()), k


# -- in plans --------------------------------------------------------------------------------------


def deep() -> Model:
    """Of seven blocks: one more of them on the device is not much beside all of them."""
    torch.manual_seed(0)
    model = Model()
    model.blocks.extend(Block() for _ in range(3))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith((".down", ".up")))
    return model


def test_a_plan_copies_ahead_where_there_is_room(tmp_path: Path) -> None:
    """Bits, and the measured peak as predicted, to 4 KiB. The step waits for less of the copies than all of them."""
    plain = Trained(None, steps=4, model=deep())
    tight = Trained("min", steps=4, model=deep())
    roomy = Trained(tight.status.plan.budget_nbytes + MIB, steps=4, model=deep())
    for found in (tight, roomy):
        plan = found.status.plan
        assert found.is_as(plain) and found.status.measured_peak_nbytes <= plan.budget_nbytes
        assert 0 <= found.status.predicted_peak_nbytes - found.status.measured_peak_nbytes <= 4096
        report = validate(found.graph, plan.lives, lower(found.graph, plan.lives))
        assert not report.problems and report.peak_nbytes == plan.predicted.peak_nbytes
        assert plan.lower_bound_seconds <= plan.predicted.seconds
    ahead = [unit for unit in roomy.status.plan.weights if any(unit.beside)]
    assert ahead and not any(any(unit.beside) for unit in tight.status.plan.weights)
    assert all(unit.seconds < unit.copy_seconds for unit in ahead)
    assert roomy.status.plan.predicted.stall_seconds < roomy.status.plan.predicted.copy_seconds
    path = tmp_path / "plan.json"
    write_plan(path, roomy.status.plan, roomy.graph)
    assert read_plan(path)[0].weights == roomy.status.plan.weights


def test_a_plan_may_rebuild_from_a_weight_that_comes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the module before its own stays, the copy begins later, and the plan cannot run: so no weight stays."""
    plain = Trained(None, steps=4, model=deep())
    tight = Trained("min", steps=4, model=deep())
    refused: list[int] = []
    simulate = parking.simulate

    def refuses_once(*args: Any, **kwargs: Any) -> Any:
        if not refused:
            refused.append(len(args))
            raise LoweringError("a weight is not in memory")
        return simulate(*args, **kwargs)

    monkeypatch.setattr(parking, "simulate", refuses_once)
    roomy = Trained(tight.status.plan.budget_nbytes + MIB, steps=4, model=deep())
    assert refused and roomy.is_as(plain) and roomy.status.phase == "planned"
    assert roomy.status.measured_peak_nbytes <= roomy.status.plan.budget_nbytes
    assert len(roomy.status.plan.weights) == len(tight.status.plan.weights)
