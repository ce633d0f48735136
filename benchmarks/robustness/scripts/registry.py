"""What a training script is given, and how it is registered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Watch(Protocol):
    """`optimize` with a budget, or the plain run."""

    def __call__(self, model: nn.Module, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """Around the training loop of a model."""

    def strategy(self) -> Any:
        """For Lightning's `Trainer(strategy=...)`."""

    def callbacks(self) -> list[Any]:
        """For transformers' `Trainer(callbacks=...)`."""

    def fabric_strategy(self) -> Any:
        """For Lightning's `Fabric(strategy=...)`."""

    def prepare(self, accelerator: Any, *objects: Any) -> Any:
        """In the place of `accelerator.prepare(*objects)`."""


Log = Callable[..., None]
"""Called once after every step, with losses or whatever else the script would print."""
Train = Callable[[Watch, Log, int], dict[str, Any]]


@dataclass(frozen=True)
class Script:
    """A training script.

    needs: modules it imports that may be absent.
    steps: how many calls of `log` there will be.
    options: of the package, beside the budget.
    """

    name: str
    title: str
    train: Train
    needs: tuple[str, ...] = ()
    steps: int = 14
    options: Mapping[str, Any] = field(default_factory=dict)


def script(title: str, needs: tuple[str, ...] = (), steps: int = 14) -> Callable[[Train], Train]:
    """Registers a training function under its own name."""

    def register(train: Train) -> Train:
        train.script = Script(train.__name__, title, train, needs, steps)  # type: ignore[attr-defined]
        return train

    return register


def scripts(family: ModuleType) -> Iterator[Script]:
    """The scripts of a module, in the order they are written."""
    for value in vars(family).values():
        if isinstance(registered := getattr(value, "script", None), Script):
            yield registered


def images(count: int, size: int, channels: int = 1, side: int = 16, classes: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` batches of noise with labels: (size, channels, side, side) and (size,)."""
    source = torch.Generator().manual_seed(11)
    for _ in range(count):
        yield (
            torch.rand(size, channels, side, side, generator=source),
            torch.randint(0, classes, (size,), generator=source),
        )


def tokens(count: int, shape: tuple[int, ...], words: int = 40) -> Iterator[Tensor]:
    """`count` batches of words."""
    source = torch.Generator().manual_seed(12)
    for _ in range(count):
        yield torch.randint(0, words, shape, generator=source)


def rows(count: int, size: int, width: int) -> Iterator[Tensor]:
    """`count` batches of vectors."""
    source = torch.Generator().manual_seed(13)
    for _ in range(count):
        yield torch.randn(size, width, generator=source)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One turn of one of several optimizers."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fit(
    watch: Watch, log: Log, model: nn.Module, optimizer: Any, data: Iterable[Any], loss_of: Callable[[Any], Tensor]
) -> dict[str, Any]:
    """The plainest loop: a loss of each batch, and an update."""
    with watch(model, optimizer) as run:
        for batch in data:
            loss = loss_of(batch)
            optimizer.zero_grad()
            with contextlib.nullcontext() if run is None else run.last_backward():
                loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "optimizer": optimizer}
