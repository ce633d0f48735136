"""Parts: what a session has only if a config, a model or other ranks need it. A session calls them as its steps go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.optim import Optimizer


class Part:
    """A part of a session. A subclass overrides the methods that it needs; only these are called."""

    def call_begins(self) -> None:
        """The model is called in training."""

    def forward_begins(self, signature: object) -> None:
        """The call begins a forward with this signature."""

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        """The forward is the first one of a step. `state`: the state of its signature. `limit_nbytes`: the budget without the
        headroom; None for "min".
        """

    def update_begins(self, optimizer: Optimizer, own: bool, closure: bool) -> None:
        """The step of this optimizer begins. `own`: it delimits steps of the model. `closure`: it runs forward and backward
        inside.
        """

    def step_ended(self, planned: Sequence[object]) -> None:
        """The step is over. `planned`: the states whose plans were in force in it."""

    def between_steps(self, state: object) -> None:
        """The session is between two steps, and what observed the last one holds nothing. `state`: the one of the last step's
        signature, which may have a plan by now.
        """

    def evaluates(self, within_step: bool) -> None:
        """A forward of evaluation begins. `within_step`: between a forward of training and its update."""

    def evaluation_begins(self) -> None:
        """The loop evaluates from now on; a step may go on afterwards."""

    def close(self) -> None:
        """The run is over. May be repeated."""


P = ParamSpec("P")
AnyPart = TypeVar("AnyPart", bound=Part)


class Parts:
    """The parts of one session. Each attribute has the name of a method of `Part`, and is a tuple of the methods to call."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._sort()

    def add(self, part: AnyPart, first: bool = False) -> AnyPart:
        """The session has this part from now on. `first`: it is called before the others."""
        self._parts.insert(0 if first else len(self._parts), part)
        self._sort()
        return part

    def drop(self, part: Part | None) -> None:
        """The session does not have this part any more."""
        self._parts = [other for other in self._parts if other is not part]
        self._sort()

    def _sort(self) -> None:
        self.call_begins = self._overriding(Part.call_begins)
        self.forward_begins = self._overriding(Part.forward_begins)
        self.step_begins = self._overriding(Part.step_begins)
        self.update_begins = self._overriding(Part.update_begins)
        self.step_ended = self._overriding(Part.step_ended)
        self.between_steps = self._overriding(Part.between_steps)
        self.evaluates = self._overriding(Part.evaluates)
        self.evaluation_begins = self._overriding(Part.evaluation_begins)
        self.close = self._overriding(Part.close)

    def _overriding(self, method: Callable[Concatenate[Any, P], None]) -> tuple[Callable[P, None], ...]:
        name = method.__name__
        return tuple(getattr(part, name) for part in self._parts if getattr(type(part), name) is not method)
