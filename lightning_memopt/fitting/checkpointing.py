"""Gradient checkpointing of the step that is asked about: it is taken off, since a plan replaces it, or it stays, and the step
is recorded with all that runs again in backward, to say what checkpointing alone brings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from lightning_memopt.errors import ConfigError
from lightning_memopt.integrations.transformers_private import checkpointing_function
from lightning_memopt.torch_private import CHECKPOINT_GENERATOR, no_dispatch_modes, no_torch_functions

CHECKPOINTED = "gradient checkpointing"
"""What an answer says of a step whose checkpointing was taken off."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
_ON = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_OFF = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
"""What turns the checkpointing of a model of transformers on and off, the newer name first."""


@dataclass(frozen=True)
class Checkpointed:
    """The step on a card with gradient checkpointing, and without a plan.

    fits: whether it does.
    peak_nbytes: what torch's allocator reserves for it.
    missing_nbytes: bytes by which that is too large; 0 if it fits.
    slowdown: its predicted seconds as a multiple of those of the step without checkpointing.
    largest_batch, longest: the largest number of samples, and of tokens of a sample, with which it fits; None if not known.
    """

    fits: bool
    peak_nbytes: int
    missing_nbytes: int
    slowdown: float
    largest_batch: int | None
    longest: int | None


@contextlib.contextmanager
def taken_off(calls: Callable[[], None]) -> Iterator[None]:
    """Within, what is checkpointed runs plainly; `calls` is called for each."""

    def plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
        calls()
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
            calls()
            return function(*args)

    with _instead(plainly, Plain):
        yield


@contextlib.contextmanager
def kept(calls: Callable[[], None], again: Context, cuda: bool) -> Iterator[None]:
    """Within, what is checkpointed runs again in backward, in the context that `again` gives: function modes are off there.

    calls: is called for each.
    cuda: generator states that are kept for it are in the memory of the host, as those of a CUDA device are, and do not count.
    """
    generator, reentrant = getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR), torch.utils.checkpoint.CheckpointFunction

    def checkpoint(
        function: Callable[..., Any], preserves: bool = True, contexts: Any = noop_context_fn, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        calls()

        def both() -> tuple[Any, Any]:
            forward, backward = contexts()
            return forward, _Again(lambda: backward, again, _random_numbers() if cuda and preserves else None)

        yield from generator(function, preserves and not cuda, both, *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
            calls()
            runs, drawn = iter((False,)), _random_numbers() if cuda and preserves else None

            def run(*given: Any) -> Any:
                if not next(runs, True):
                    return function(*given)
                with _Again(contextlib.nullcontext, again, drawn):
                    return function(*given)

            return reentrant.apply(run, preserves and not cuda, *args)

    with _instead(checkpoint, Reentrant):
        yield


@contextlib.contextmanager
def turned_on(model: nn.Module) -> Iterator[None]:
    """Within, a model of transformers checkpoints its layers, if it can. Checkpointing that is on already stays as it is."""
    able = next((m for m in model.modules() if getattr(m, "supports_gradient_checkpointing", False)), None)
    if able is None or any(checkpointing_function(m) is not None for m in model.modules()):
        yield
        return
    _call(able, _ON, {"use_reentrant": False})
    try:
        yield
    finally:
        _call(able, _OFF)


def refuse_none(checkpoints: int) -> None:
    """Raise ConfigError if nothing was checkpointed."""
    if not checkpoints:
        raise ConfigError(
            "nothing in this step is checkpointed, and its model has no gradient_checkpointing_enable(). Use "
            "torch.utils.checkpoint in it, or leave the option out"
        )


@contextlib.contextmanager
def same_random_numbers(begin: bytearray | None = None) -> Iterator[None]:
    """Afterwards, the random numbers are those that would have been drawn without this. (`fork_rng` keeps a tensor, which would
    count as memory of the step.)

    begin: the state of the generator within; None: as it is.
    """
    state = _random_numbers()
    try:
        if begin is not None:
            _draw_from(begin)
        yield
    finally:
        _draw_from(state)


class _Again:
    """The context in which a checkpointed function runs again, once or more often.

    given: the context that the user gives. again: what else is on then. drawn: the state that its random numbers begin from.
    """

    def __init__(self, given: Context, again: Context, drawn: bytearray | None) -> None:
        self._given = given
        self._again = again
        self._drawn = drawn

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._drawn is not None:
                stack.enter_context(same_random_numbers(self._drawn))
            stack.enter_context(self._given())
            stack.enter_context(self._again())
            self._stack = stack.pop_all()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._stack.__exit__(*raised)


def _instead(generator: Any, reentrant: Any) -> contextlib.AbstractContextManager[Any]:
    """Within, checkpoints of both kinds are these."""
    return mock.patch.multiple(torch.utils.checkpoint, **{CHECKPOINT_GENERATOR: generator, "CheckpointFunction": reentrant})


def _call(model: Any, names: tuple[str, ...], *args: Any) -> None:
    """Call the first of these methods that the model has."""
    next(method for name in names if (method := getattr(model, name, None)) is not None)(*args)


def _random_numbers() -> bytearray:
    """The state of the generator, in memory that is not torch's. (A recorder keeps what is given away by `numpy`.)"""
    with no_dispatch_modes(), no_torch_functions():
        state = torch.get_rng_state()
        copy = bytearray(len(state))
        torch.frombuffer(copy, dtype=torch.uint8).copy_(state)
    return copy


def _draw_from(state: bytearray) -> None:
    with no_dispatch_modes(), no_torch_functions():
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
