"""Weights that change between forward and backward: what a rebuild would read, or autograd itself."""

import pytest
import torch
from torch import nn

from tests.cpu.lib.harness import dropping
from tests.cpu.lib.models import Body, data, made, same_error, squares

X = data(8, 16)


@pytest.mark.parametrize("foreach", [False, True])
def test_b13_weights_changed_between_forward_and_backward(foreach):
    """The error of plain autograd, whose class is RuntimeError."""

    def step():
        model = made(Body)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = squares(model, X)
        optimizer.step()
        return loss

    same_error(step, match="modified by an inplace operation")


def test_b13_weight_that_only_a_rebuild_reads():
    """REFUSED: plain autograd does not need the weight, a rebuild does; never a silently different gradient."""
    w, v = nn.Parameter(data(16)), nn.Parameter(data(16))

    with dropping() as engine:
        loss = ((v + w).exp()).sum()
    with torch.no_grad():
        w.mul_(2)
    assert engine.evictions > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
