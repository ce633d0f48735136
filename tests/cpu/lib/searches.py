"""What batch sizes are searched with: models with their loops, data, and the comparison of all that a search could change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightning_memopt import find_max_batch_size
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import CLASSES, LENGTH, WORDS, batches, small, step

BUDGET = 500_000


class Words:
    """A small model, its optimizer and loop body, and batches from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.model = small(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.generator = torch.Generator().manual_seed(1)
        self.sizes: list[int] = []

    def make(self, size: int) -> tuple[Tensor, Tensor]:
        draw = lambda high: torch.randint(0, high, (size, LENGTH), generator=self.generator)  # noqa: E731
        return draw(WORDS), draw(CLASSES)

    def step(self, batch: Any) -> None:
        self.sizes.append(len(batch[0]))
        step(self.model, self.optimizer, batch)

    def find(self, source: Any = None, **options: Any) -> Any:
        options = {"budget": BUDGET, "start": 8, "planned": False, **options}
        return find_max_batch_size(
            self.step,
            self.make if source is None else source,
            self.model,
            self.optimizer,
            keep=(self.generator, *options.pop("keep", ())),
            **options,
        )

    def state(self) -> list[Any]:
        """All that a search could change, copied."""
        state = self.optimizer.state_dict()
        moments = [t.clone() for s in state["state"].values() for t in s.values()]
        grads = [p.grad for p in self.model.parameters()]
        tensors = [t.clone() for t in self.model.state_dict().values()]
        return [tensors, moments, grads, state["param_groups"], self.generator.get_state(), torch.get_rng_state(),
                random.getstate(), np.random.get_state()[1].tolist(), self.model.training]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Square(nn.Module):
    """Nothing that two small sizes show: from 20 samples on it holds the square of the batch for every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        if len(x) > 20:
            h = h + (h[:, None, :1] * h[None, :, :1]).exp().mean((1, 2))[:, None]
        return h.square().mean()


class Plain:
    """A model on random numbers, SGD; `errors` are raised in its forward."""

    def __init__(self, model: nn.Module, error: Callable[[int], BaseException | None] = lambda n: None) -> None:
        self.model, self.error = model, error
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.tried: list[int] = []

    def step(self, x: Tensor) -> None:
        self.tried.append(len(x))
        error = self.error(len(x))
        if error is not None:
            raise error
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, **options: Any) -> Any:
        options = {"planned": False, "start": 4, **options}
        return find_max_batch_size(self.step, lambda n: torch.randn(n, 8), self.model, self.optimizer, **options)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A number of samples; each iteration starts from the beginning."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.count):
            self.reads += 1
            yield tuple(t[0] for t in batches(1, 1, seed=i)[0])  # type: ignore[misc]
