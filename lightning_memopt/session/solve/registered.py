"""What `register_optimizer` says of a step, checked while the step is rehearsed.

A step that gets its parameters in chunks, or one by one in backward, is called with copies of its groups, and more often. What
it writes there is lost, what it counts is wrong, and what it holds from one chunk to the next is in no plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import optim

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.record import parameters_of
from lightning_memopt.runtime.early_updates import options_of, step_without_hooks
from lightning_memopt.runtime.parked import LEAST_NBYTES
from lightning_memopt.runtime.state_chunks import Chunks
from lightning_memopt.torch_private import tree_leaves
from lightning_memopt.units import format_nbytes


class Ledger(Protocol):
    """What is seen of the ops of a step.

    live_nbytes: bytes of the tensors that they have made and that are alive.
    draws: whether they have drawn random numbers.
    written: the storages that they have written to.
    """

    live_nbytes: int
    draws: bool
    written: set[int]


class RegisteredStep:
    """The step of a throw-away optimizer whose class is registered."""

    def __init__(self, double: optim.Optimizer, ledger: Ledger) -> None:
        self._double = double
        self._ledger = ledger
        self._raw = step_without_hooks(type(double)) or type(double).step
        self._rounds = self._most_nbytes = 0

    def __call__(self) -> None:
        """Run it, with a group for each parameter. Raises UnsupportedError where it does what a registered step does not."""
        double, groups = self._double, self._double.param_groups
        alone = [{**group, "params": [p]} for group in groups for p in group["params"]]
        double.param_groups = Chunks(alone, inspect.unwrap(type(double).step).__code__, self._given)
        options, attributes, before_nbytes = options_of(double), dict(vars(double)), self._ledger.live_nbytes
        self._rounds, self._most_nbytes = 0, before_nbytes
        try:
            self._raw(double)
            changes = options_of(double) != options
            changed = [name for name, value in vars(double).items() if attributes.get(name) is not value]
        finally:
            double.param_groups = groups
        if self._rounds != 1:
            raise self._refusal(
                f"goes through self.param_groups {self._rounds} times in its own frame", "Let one `for` loop of step() do so"
            )
        if changed:
            raise self._refusal(f"sets self.{changed[0]}", "Keep it in self.state[p]")
        if changes:
            raise self._refusal("changes options of its groups", "Keep what it counts in self.state[p]")
        if self._ledger.draws:
            raise self._refusal("draws random numbers, which other parameters would get in backward", "Draw none")
        held_nbytes = self._most_nbytes - before_nbytes
        makes_state = self._ledger.live_nbytes > before_nbytes
        if held_nbytes >= LEAST_NBYTES and not makes_state:  # the next rehearsed step makes none
            raise self._refusal(
                f"still holds temporary tensors of {format_nbytes(held_nbytes)} when it goes on to the next parameter",
                "Update each parameter in a function of its own, whose variables end with it",
            )

    def without_gradients(self) -> None:
        """Run it once more, where no parameter has a gradient. Raises UnsupportedError where it does anything then."""
        double, fix = self._double, "Skip parameters whose gradient is None"
        for p in parameters_of(double):
            p.grad = None
        before = tree_leaves(list(double.state.values()))
        self._ledger.written.clear()
        try:
            self()
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise self._refusal(f"fails where a parameter has no gradient: {error}", fix) from error
        after = tree_leaves(list(double.state.values()))
        tensors = [t for t in (*parameters_of(double), *before) if isinstance(t, torch.Tensor)]
        written = not self._ledger.written.isdisjoint(t.untyped_storage()._cdata for t in tensors)
        if written or len(after) != len(before) or not all(map(_same, before, after)):
            raise self._refusal("also updates a parameter that has no gradient, or its state", fix)

    def _given(self, _: FrameType) -> Iterator[dict[str, Any]]:
        self._rounds += 1
        for group in list(self._double.param_groups):
            yield group
            self._most_nbytes = max(self._most_nbytes, self._ledger.live_nbytes)

    def _refusal(self, what: str, fix: str) -> UnsupportedError:
        return refusal(self._double, what, fix)


def refusal(optimizer: optim.Optimizer, what: str, fix: str) -> UnsupportedError:
    """The error for a registered class whose step is not as `register_optimizer` has it."""
    return UnsupportedError(
        f"{type(optimizer).__name__} is registered as an optimizer that updates each parameter by itself, but its step {what}. "
        f"{fix}, or do not register it."
    )


def _same(before: Any, after: Any) -> bool:
    return before is after or (not isinstance(before, torch.Tensor) and bool(before == after))
