"""Memory of gradients that somebody else has: arrays of NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import optim

from tests.cpu.lib.engines import needs_native
from tests.cpu.parking.test_gradients import Parked, parked, scaled

pytestmark = needs_native  # without it gradients are not parked, and a line says so

__all__ = ["parked"]


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_an_array_of_a_gradient_keeps_its_memory(kind: Callable[..., optim.Optimizer]) -> None:
    """It shows what the update writes, and keeps its bits when the next gradient and the end of the parking come."""
    parked = Parked(kind)
    arrays = [gradient.numpy() for gradient, _ in parked.pairs]
    with parked.gradients.there(list(parked.model.parameters())):
        scaled(parked)
    plain = [gradient.numpy() for _, gradient in parked.pairs]
    assert all(map(np.array_equal, arrays, plain)) and parked.is_same()
    for each in (parked.model, parked.twin):
        each.zero_grad()
    parked.backward()
    assert all(map(np.array_equal, arrays, plain)) and parked.away() == 4
    again = [gradient.numpy() for gradient, _ in parked.pairs]
    parked.gradients.park()
    parked.gradients.close()
    assert all(map(np.array_equal, arrays, plain)) and parked.is_same() and not parked.away()
    assert all(np.shares_memory(array, gradient.numpy()) for array, (gradient, _) in zip(again, parked.pairs, strict=True))
    assert parked.said == [
        "MemOpt: gradients that the plan parks: others have the memory of some (`numpy()`), which stay where they are"
    ]


def test_an_array_that_is_taken_in_an_update_keeps_its_memory(parked: Parked) -> None:
    with parked.gradients.there(list(parked.model.parameters())):
        arrays = [gradient.numpy() for gradient, _ in parked.pairs]
    assert not parked.away()
    scaled(parked)
    assert all(np.array_equal(array, plain.numpy()) for array, (_, plain) in zip(arrays, parked.pairs, strict=True))
    parked.gradients.park()
    assert not parked.away()


def test_a_gradient_in_the_memory_of_an_array_stays(parked: Parked) -> None:
    arrays = []
    for p, q in zip(parked.model.parameters(), parked.twin.parameters(), strict=True):
        arrays.append(np.zeros(tuple(p.shape), np.float32))
        p.grad, q.grad = torch.from_numpy(arrays[-1]), torch.zeros_like(q)
    parked.backward()
    assert not parked.away()
    for array, q in zip(arrays, parked.twin.parameters(), strict=True):
        assert q.grad is not None and np.array_equal(array, q.grad.numpy())
