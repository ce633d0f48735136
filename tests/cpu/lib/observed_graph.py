"""The graph of one observed step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_memopt.graph import Graph
from lightning_memopt.session.observe.observation import Observation

CPU = torch.device("cpu")


def graph_of(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    forward: Callable[[], torch.Tensor],
    device: torch.device = CPU,
    verify: bool = True,
    meter: bool = False,
) -> Graph:
    """The graph of a forward, which gives a loss, and its backward. `verify`, `meter`: those of the observation."""
    observation = Observation(model, [], device, None, verify=verify, meter=meter)
    with observation.begin_round(batch):
        loss = forward()
    observation.forward_ended()
    loss.backward()
    del loss
    graph = observation.finish()
    assert graph is not None
    return graph
