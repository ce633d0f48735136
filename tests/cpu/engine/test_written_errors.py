"""Errors of memory that was written, or resized, after the forward: they name the tensor, the op, the module and the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memopt import optimize
from lightning_memopt.errors import ModifiedError
from tests.cpu.engine.test_written_after_forward import SIZE, Meddled, train
from tests.cpu.lib.models import Body, data, made, sgd, squares


def line_of(method: Callable[..., Any], offset: int) -> str:
    return f"{method.__code__.co_filename}:{method.__code__.co_firstlineno + offset} in {method.__name__}"


@pytest.mark.parametrize("emptied", [False, True])
def test_the_error_names_what_a_rebuild_starts_from(emptied: bool) -> None:
    """Shape, dtype, the buffer's name, the op that reads it, the user's line, and what to do."""
    model = made(Meddled)
    optimizer = sgd(model)
    with optimize(model, optimizer, verbose=False, budget="min", max_slowdown=math.inf, profile_steps=1):
        train(model, optimizer, squares, steps=2)
        loss = squares(model, data(SIZE, 16))
        if emptied:
            model.shift.untyped_storage().resize_(0)
        else:
            model.shift.mul_(0.5)
        with pytest.raises(ModifiedError) as error:
            loss.backward()
    text = str(error.value)
    assert "[torch.FloatTensor [16]]" in text and "shift" in text and "aten::sub.Tensor" in text
    assert line_of(Meddled.forward, 1) in text and "profile_steps" in text and "Work on a clone" in text
    assert ("resized to 0 bytes" in text) is emptied


class Saving(Body):
    def between(self, h: Tensor, i: int) -> Tensor:
        self.seen = h * 0.5
        return self.seen.sin()


@pytest.mark.parametrize("planned", [False, True])
def test_the_error_of_a_weight_names_it(planned: bool) -> None:
    """REFUSE as plain autograd does, with the name of the parameter."""
    model = made(Body)
    optimizer = sgd(model)
    with optimize(model, optimizer, verbose=False, budget="min", profile_steps=1):
        train(model, optimizer, squares, steps=2 * planned)
        loss = squares(model, data(SIZE, 16))
        with torch.no_grad():
            model.layers[1].weight.mul_(2)
        with pytest.raises(ModifiedError, match="modified by an inplace operation") as error:
            loss.backward()
    assert "[16, 16]" in str(error.value) and "layers.1.weight" in str(error.value)


@pytest.mark.parametrize("planned", [False, True])
def test_the_error_of_a_saved_tensor_names_it(planned: bool) -> None:
    """REFUSE as plain autograd does, with the op and the module that made it and the line that read it."""
    model = made(Saving)
    optimizer = sgd(model)
    with optimize(model, optimizer, verbose=False, budget="min", profile_steps=1) as run:
        train(model, optimizer, squares, steps=2 * planned)
        assert (run.plan is not None) is planned
        loss = squares(model, data(SIZE, 16))
        with torch.no_grad():
            model.seen.mul_(2)
        with pytest.raises(ModifiedError, match="modified by an inplace operation") as error:
            loss.backward()
    text = str(error.value)
    assert f"[torch.FloatTensor [{SIZE}, 16]]" in text and "made by aten::mul" in text
    assert line_of(Saving.between, 2) in text
