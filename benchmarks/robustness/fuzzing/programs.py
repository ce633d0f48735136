"""The model of a case, and what departs in its forwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn

from benchmarks.robustness.fuzzing.case import Case, Departure, Node
from benchmarks.robustness.fuzzing.ops import LAYERS, OPS, WIDTH, Parts


class Expected(Exception):
    """Raised on purpose, in the middle of a forward."""


class Model(nn.Module):
    """Runs the nodes of a case. `departures`: of the next forward, by node. `kept`: what user code holds of it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.nodes = case.nodes
        self.parts = Parts(case.shared)
        self.departures: dict[int, Departure] = {}
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return sum(value.float().square().mean() for value in self.values(x)[-3:])  # type: ignore[return-value]

    def values(self, x: Tensor) -> list[Tensor]:
        """What the nodes give."""
        values = [self.parts.linear[0](x)]
        for at, node in enumerate(self.nodes):
            departure = self.departures.get(at)
            if departure is None:
                values.append(self._run(node, values))
            else:
                values.extend(self._departed(departure, node, values))
        return values

    def _run(self, node: Node, values: list[Tensor]) -> Tensor:
        a, b = (values[-1 - i % len(values)] for i in (node.a, node.b))
        return OPS[node.op](self.parts, a, b, node.k)

    def _departed(self, departure: Departure, node: Node, values: list[Tensor]) -> list[Tensor]:
        """The values of a node where this forward departs."""
        what, k = departure.what, departure.k
        a = values[-1 - node.a % len(values)]
        layer = self.parts.linear[k % LAYERS]
        if what == "skip":
            return []
        if what == "raise":
            raise Expected
        if what == "other":
            return [self._run(Node(list(OPS)[k], node.a, node.b, k), values)]
        if what == "extra":
            return [self._run(node, values), torch.tanh(a.cos() * layer(a))]
        if what == "flags":
            with torch.backends.mkldnn.flags(enabled=False):
                return [self._run(node, values)]
        if what == "inner":
            if a.requires_grad and torch.is_grad_enabled():
                torch.autograd.grad(layer(a).sum(), a, retain_graph=True)
            return [self._run(node, values)]
        if what == "no grad":
            with torch.no_grad():
                values = [*values, layer(a).sin()]
            return [self._run(node, values)]
        _DOES[what](self, a, k)
        return [self._run(node, values)]


def _hold(model: Model, a: Tensor, k: int) -> None:
    model.kept.append(a)


def _save(model: nn.Module, a: Tensor, k: int) -> None:
    saved = io.BytesIO()
    torch.save(model.state_dict() if k % 2 else model, saved)


def _resize(model: Model, a: Tensor, k: int) -> None:
    """Memory-saving code: the bytes of a tensor that is used no more are let go."""
    spare = torch.sin(a.detach())
    torch.tanh(spare)
    spare.untyped_storage().resize_(0)


_DOES = {
    "data": lambda model, a, k: a.data.mul_(0.5),
    "hold": _hold,
    "numpy": lambda model, a, k: a.detach().float().numpy(),
    "in place": lambda model, a, k: a.mul_(1.5),
    "draw": lambda model, a, k: torch.rand(k + 1),
    "collect": lambda model, a, k: gc.collect(),
    "seed": lambda model, a, k: torch.manual_seed(k),
    "copy": lambda model, a, k: copy.deepcopy(model.parts.linear),
    "save": lambda model, a, k: _save(model.parts.linear, a, k),
    "resize": _resize,
}


class Data:
    """The batches of a run. Each is a tensor on an array that the loop may fill again."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.default_rng(seed)
        self.array = self._drawn(8)

    def _drawn(self, rows: int) -> numpy.ndarray:
        return self._generator.standard_normal((rows, WIDTH), dtype=numpy.float32)

    def batch(self, rows: int) -> Tensor:
        if self.array.shape[0] != rows:
            self.array = self._drawn(rows)
        self.refill()
        return torch.from_numpy(self.array)

    def refill(self) -> None:
        self.array[:] = self._drawn(self.array.shape[0])


def between(model: Model, what: str, x: Tensor, data: Data) -> None:
    """Between forward and backward."""
    parts = model.parts
    with torch.no_grad():
        if what == "input":
            x.mul_(2)
        elif what == "buffer":
            parts.mean.mul_(0.5)
        elif what == "buffer data":
            parts.mask.data = torch.full_like(parts.mask, 0.5)
        elif what == "refill":
            data.refill()
        elif what == "weight":
            parts.scale.mul_(1.01)
        elif what == "draw":
            torch.rand(2)
        elif what == "save":
            _save(parts.linear, x, 0)
        elif what == "copy":
            copy.deepcopy(model.parts.linear)


def before(model: Model, what: str, optimizer: torch.optim.Optimizer, average: list[Tensor], x: Tensor) -> None:
    """Before a step. "accumulate" and "refill" are the loop's."""
    parts = model.parts
    if what == "evaluate":
        with evaluating(model), torch.no_grad():
            model(x)
    elif what == "forward":
        model(x)
    elif what == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    elif what == "average":
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    elif what == "load":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    elif what in ("freeze", "unfreeze"):
        parts.linear[1].requires_grad_(what == "unfreeze")
    elif what == "zero":
        optimizer.zero_grad(set_to_none=False)
    elif what == "collect":
        gc.collect()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
