"""An optimizer's step that torch.compile compiles, in a plain loop: the same bits, a plan in force, nothing left behind."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.early import counted
from tests.cpu.lib.fits import assert_same_tree
from tests.cpu.lib.loops import batches, leaves_nothing, loss_of, small


def trained(mode: str | None) -> tuple[list[object], Run | None]:
    """`mode`: the value of `optimizer_in_backward`; None for the plain loop."""
    torch._dynamo.reset()
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    watched: contextlib.AbstractContextManager[Run | None] = contextlib.nullcontext()
    if mode is not None:
        watched = optimize(model, optimizer, budget="min", profile_steps=2, verbose=False, optimizer_in_backward=mode)
    torch.manual_seed(3)
    with leaves_nothing(model), watched as run:
        for batch in batches(4):
            loss = loss_of(model, batch)
            with contextlib.nullcontext() if run is None else run.last_backward():
                loss.backward()
            step()
            optimizer.zero_grad()
    return [model.state_dict(), optimizer.state_dict()], run


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo names what it cannot trace
def test_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXACT: dynamo would trace the hooks that end a step, and puts the dispatch keys of the observed step back after it."""
    updates = counted(monkeypatch)
    expected, _ = trained(None)
    found, run = trained("auto")
    assert_same_tree(expected, found)
    assert run is not None and run.plan is not None
    assert not updates, "a compiled step rounds otherwise than one parameter's"
    with pytest.raises(UpdatesInBackwardError, match="compiled"):
        trained("always")
    assert torch.empty(1).shape == (1,), "no dispatch key of an observed step is left"
