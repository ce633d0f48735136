"""What user code still holds counts until it lets go, also what an in-place op has made: peaks in forward depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.graph import resident_nbytes
from lightning_memopt.plan import simulate
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.trace import metered_cpu

ROWS, WIDTH = 256, 64
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda h: torch.zeros(ROWS, WIDTH),
    "in place": lambda h: torch.zeros(ROWS, WIDTH).add_(1),
    "a view of it": lambda h: torch.zeros(ROWS, WIDTH).add_(1).permute(1, 0),
    "one_hot": lambda h: nn.functional.one_hot(h.detach().argmax(-1), num_classes=WIDTH).permute(1, 0),
    "twice": lambda h: torch.zeros(ROWS, WIDTH).add_(1).mul_(2)[:, :2],
}


class Holds(nn.Module):
    """A mask that is read early and late, and large temporaries between."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(WIDTH, WIDTH), make

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        mask = self.make(h)
        h = h + mask.sum()
        with torch.no_grad():
            large = torch.cat([h] * 8).sin().mean()
        return (h * large).exp() + mask.sum()


@pytest.mark.parametrize("how", MADE)
def test_until_it_is_let_go(how: str) -> None:
    torch.manual_seed(0)
    model, x = Holds(MADE[how]), torch.randn(ROWS, WIDTH)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    observation = Observation(model, [], torch.device("cpu"), None, verify=True, meter=True)
    model.zero_grad()
    with observation.begin_round((x,)):
        y = model(x)
    observation.forward_ended()
    y.sum().backward()
    del y
    graph = observation.finish()
    assert graph is not None

    predicted = simulate(graph, keep_all(graph)).predicted.peak_nbytes
    model.zero_grad()
    resident = resident_nbytes(graph)  # and what other tests hold
    with metered_cpu() as events:
        step()
    assert events.peak_nbytes + resident == pytest.approx(predicted, rel=0.005)
