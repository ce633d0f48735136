"""Record a training step without computing it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_memopt.batching.trials import NEVER_PLANNED
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.operators import CudaOperators, update_together
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.graph import OUTSIDE, Graph, Tensor
from lightning_memopt.native.counting import counter

if TYPE_CHECKING:
    from lightning_memopt.bench.subject import Training

STEPS = 2
"""Steps that are recorded. Optimizers make their state in the first one, so the last one is like those that follow."""


@dataclass(frozen=True)
class Recorded:
    """A step that was recorded without being computed.

    graph: the step.
    assumed: op that returns a number to Python -> how often the number was assumed.
    ran: op without a kernel for the `meta` device -> how often it ran for real.
    """

    graph: Graph
    assumed: Counter[str]
    ran: Counter[str]


def record(build: Callable[[], Training], cuda: bool = False) -> Recorded:
    """Record a step of the training that `build` makes. No bytes of it are computed, those of its weights included.

    cuda: the step has the operators that torch would choose on a CUDA device.

    Raises ConfigError if the steps have no forward in training, backward and update.
    """
    with _same_random_numbers():
        counted, mode = counter(), Unfilled()
        before_nbytes = 0 if counted is None else counted.live_nbytes
        try:
            with mode, CudaOperators() if cuda else contextlib.nullcontext():
                graph, said = _observed(build, cuda)
        finally:
            mode.close()
    if graph is None:
        raise ConfigError(
            "the step cannot be planned: it must run a forward of the model in training, its backward, and optimizer.step(). "
            f"{said}"
        )
    return Recorded(_without(graph, before_nbytes), mode.assumed, mode.ran)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Afterwards, the random numbers are those that would have been drawn without this. (`fork_rng` keeps a tensor, which would
    count as memory of the step.)
    """
    state = bytearray(torch.get_rng_state().numpy().tobytes())
    try:
        yield
    finally:
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


def _observed(build: Callable[[], Training], cuda: bool) -> tuple[Graph | None, str]:
    """The graph of the last of a few steps, or None, and the run's report."""
    from lightning_memopt.integrations.plain import optimize

    training = build()
    if cuda:
        update_together([training.optimizer] if isinstance(training.optimizer, Optimizer) else training.optimizer)
    options: dict[str, Any] = {"budget": "min", "profile_steps": NEVER_PLANNED, "verify": False, "verbose": False}
    with optimize(training.model, training.optimizer, **options) as run:
        for _ in range(STEPS):
            training.step()
        return run.session.observed_graph, run.report()


def _without(graph: Graph, before_nbytes: int) -> Graph:
    """The graph without memory of this process that was there before."""

    def own(t: Tensor) -> Tensor:
        return replace(t, nbytes=max(0, t.nbytes - before_nbytes)) if t.name == OUTSIDE else t

    return replace(graph, tensors=tuple(map(own, graph.tensors)))
