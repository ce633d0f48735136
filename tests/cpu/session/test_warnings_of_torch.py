"""A run causes no warning of torch that the plain run does not cause."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_memopt import optimize

Step = Callable[[nn.Module], torch.Tensor]


def _adapted(model: nn.Module) -> torch.Tensor:
    """The loss after two steps on copies of the weights (MAML): the model is called with results instead of its parameters."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, weights, (torch.randn(16, 8),)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(model, weights, (torch.randn(16, 8),)).square().mean()


def _retained(model: nn.Module) -> torch.Tensor:
    """The model is called with a result that retains its gradient: torch lets everybody read it."""
    weights = {name: p * 2 for name, p in model.named_parameters()}
    for w in weights.values():
        w.retain_grad()
    return torch.func.functional_call(model, weights, (torch.randn(16, 8),)).square().mean()


@pytest.mark.parametrize("step", [_adapted, _retained])
@pytest.mark.parametrize("options", [{"budget": "min"}, {"budget": "1MiB"}, {"budget": "min", "optimizer_in_backward": "auto"}])
def test_gradients_of_results_are_not_read(step: Step, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*\.grad attribute of a Tensor that is not a leaf")
        with optimize(model, optimizer, verbose=False, **options) as run:  # type: ignore[arg-type]
            for _ in range(5):
                with run.last_backward():
                    step(model).backward()
                optimizer.step()
                optimizer.zero_grad()
