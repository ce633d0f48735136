"""The memory of trained weights that are parked: what NumPy has of it, and the bytes that move."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.runtime.weight_memory import may_be_parked
from tests.cpu.lib.parked import parked_of
from tests.cpu.parking.test_trained_weights import WIDTH, Loop, Trained, batch, known_times, same

pytestmark = pytest.mark.usefixtures(known_times.__name__)


@pytest.mark.parametrize("since", [0, 5])
def test_numpy_arrays_of_weights_show_them(since: int) -> None:
    """Arrays that are made before weights are parked, or while they are away: they see what each step writes."""

    def step(loop: Loop, i: int) -> Any:
        if i == since:
            loop.kept["arrays"] = [p.detach().numpy() for p in loop.parameters]
        loss = loop.step(i).item()
        return loss, [array.tobytes() for array in loop.kept.get("arrays", ())]

    parked = same(step)
    assert len(parked.units) == (6 if since else 0)


def test_arrays_that_are_gone_keep_no_weight() -> None:
    def step(loop: Loop, i: int) -> Any:
        loss = loop.step(i).item()
        return loss, [p.detach().numpy().tobytes() for p in loop.parameters]

    parked = same(step)
    assert len(parked.units) == 6 and all(p.untyped_storage().resizable() for p in parked.parameters[:1])


def test_a_weight_that_numpy_has_stays_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = model[0].weight
    early = weight.detach().numpy()
    assert not may_be_parked(weight) and may_be_parked(model[1].weight)
    del early
    assert may_be_parked(weight)
    with parked_of(model):
        array = weight.detach().numpy()
        model(batch()).sum().backward()
        with torch.no_grad():
            weight.add_(1)
        assert is_away(model[1].weight) and (array == weight.detach().numpy()).all()
    array[0] = 5
    assert weight[0].eq(5).all() and weight.untyped_storage().data_ptr() == array.ctypes.data


def test_a_line_says_that_numpy_has_the_address_of_a_weight_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    lines: list[str] = []
    arrays: list[Any] = []
    with parked_of(model, lines.append):
        hook = model[1].register_forward_hook(lambda module, *_: arrays.append(module.weight.detach().numpy()))
        model(batch()).sum().backward()
        hook.remove()
        assert not is_away(model[1].weight) and is_away(model[0].weight)
        model(batch()).sum().backward()
    (line,) = lines
    assert line.startswith("MemOpt: weights that the plan parks stay on the device: NumPy has the addresses of some")


@pytest.mark.parametrize("in_backward", ["never", "always"])
def test_bytes_that_move_are_those_predicted(in_backward: str) -> None:
    """The first module's weight is not read in backward: only an early update has it on the device there."""
    moved: list[int] = []

    def step(loop: Loop, i: int) -> Any:
        loss = loop.step(i)
        if loop.run is not None:
            moved.append(loop.run.session._at_rest.moved_nbytes)
            found.append(loop.run)
        return loss

    found: list[Any] = []
    trained = Trained(step, in_backward)
    plan = found[-1].plan
    rests = sum(2 * each.nbytes for each in plan.states) + sum(each.moved_nbytes for each in plan.weights)
    assert len(trained.units) == 6 and moved[-1] - moved[-2] == rests
    assert plan.lower_bound_seconds <= plan.predicted.seconds
    (first,) = (unit for unit in plan.weights if unit.module == "first")
    assert len(first.beside) == (2 if in_backward == "always" else 1)


def test_a_model_that_is_dropped_takes_its_parked_weights_with_it() -> None:
    """`to_device` parks weights without a run, so nobody closes anything."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    parked = ParkedWeights()
    parked.add("0", model[0], list(model[0].parameters()))
    model(batch()).sum().backward()
    weight, gone = weakref.ref(model[0].weight), weakref.ref(parked)
    del parked, model
    gc.collect()
    assert weight() is None and gone() is None
