"""`find_max_batch_size` around a whole training function, instead of Accelerate's `find_executable_batch_size`.

    @find_max_batch_size(starting_batch_size=128, budget="8GiB")
    def train(batch_size, ...):
        accelerator.free_memory()
        ...

A trial calls the function, and leaves it just before its first update. By then the session has observed a whole forward and
backward, has rehearsed the update, and knows whether any plan keeps the budget (`InfeasibleError`). Nothing has been updated.
Bisection finds the largest size that fits, and then the function runs with it from its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_memopt import logs
from lightning_memopt.batching import Snapshot, is_out_of_memory
from lightning_memopt.config import MemOptConfig, config_of, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError, UnsupportedError
from lightning_memopt.integrations import accelerate as front
from lightning_memopt.integrations import accelerate_private as private
from lightning_memopt.ranks import several_processes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_memopt.config import Options


class _UpdateBegins(BaseException):
    """Leaves a trial. No `except Exception` of the training function stops it."""


class _Trial:
    """A call of the training function that ends just before its first update.

    begun: whether a run was opened.
    """

    def __init__(self) -> None:
        self.begun = False
        self._watched: list[front.Watched] = []
        self._stack = contextlib.ExitStack()

    def config(self, config: MemOptConfig) -> MemOptConfig:
        if str(config.budget).strip().lower() == "min":
            raise ConfigError(
                "budget='min' fits every batch size, so there is nothing to search. Give the bytes that a step may use."
            )
        return dataclasses.replace(config, profile_steps=1, verbose=False, report=None)

    def began(self, watched: front.Watched) -> None:
        self.begun = True
        self._watched.append(watched)
        if sum(len(w.runs) for w in front._process.watched) > 1:
            raise UnsupportedError(
                "find_max_batch_size ends a trial before the first update, but this function trains several models, and one of "
                "them would already be updated. Use accelerate.utils.find_executable_batch_size, or give a batch size."
            )
        (run,) = watched.runs.values()

        def before_update(optimizer: Any, *_: Any) -> None:  # runs after the session's own hook, which was registered first
            if any(optimizer is o for o in run.session.optimizers):
                raise _UpdateBegins

        self._stack.callback(register_optimizer_step_pre_hook(before_update).remove)

    def end(self) -> None:
        """Leave nothing behind."""
        self._stack.close()
        for watched in self._watched:
            watched.end()


def find_max_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    *,
    config: MemOptConfig | None = None,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A decorator: call `function(batch_size, ...)` with the largest batch size that fits a memory budget.

    Like `accelerate.utils.find_executable_batch_size`, with these differences: the budget is in bytes, so that a size is
    refused without running out of memory; sizes are exact, not powers of 0.9; every call searches anew; and trials restore the
    arguments of the function, variables of functions around it, and random generators. Whatever else the function does before
    its first update, each trial repeats (files that it writes, lines that it prints, global variables).

    The function must call `Accelerator.prepare` itself. If not, it runs once with the starting size, and a line says so.

    Args:
        function: the training function; its first argument is the batch size.
        starting_batch_size: the largest size that is tried, in samples; 1 or more.
        config: all options in one object.
        options: those of `MemOptConfig`. Default: the launcher's.

    Raises (when the function is called):
        ConfigError: the budget is "min", which every size fits.
        InfeasibleError: not even one sample fits.
        UnsupportedError: this is one of several processes, or the function trains several models.
    """
    if not isinstance(starting_batch_size, int) or starting_batch_size < 1:
        raise ConfigError(f"starting_batch_size is {starting_batch_size!r}; give the largest size to try as an int, 1 or more.")
    if function is None:
        return functools.partial(find_max_batch_size, starting_batch_size=starting_batch_size, config=config, **options)
    asked = config_of(config, options) if config is not None or options else None
    count = len(inspect.signature(function).parameters)
    train = function

    @functools.wraps(train)
    def call(*args: Any, **kwargs: Any) -> Any:
        if count < len(args) + 1:
            raise TypeError(f"{train.__name__} gets its batch size from find_max_batch_size; call it without that argument.")
        if several_processes():
            raise UnsupportedError(
                "find_max_batch_size searches in one process, because several would find different sizes. Search in one "
                "process, and give that size to all."
            )
        front._install()
        before, front._process.now = front._process.now, asked or front._process.now or front._process.always or _default()
        try:
            return _searched(train, starting_batch_size, args, kwargs)
        finally:
            front._process.now = before

    return call


def _default() -> MemOptConfig:
    return config_of(None, front.launched_options())


def _searched(train: Callable[..., Any], largest: int, args: Any, kwargs: Any) -> Any:
    """Run the function with the largest size that fits, and return its result."""
    if disabled():
        return train(largest, *args, **kwargs)
    fits, too_large, size, trials = 0, largest + 1, largest, 0
    while fits + 1 < too_large:
        trials += 1
        why = _tried(train, size, args, kwargs)
        if isinstance(why, _Finished):
            return why.result
        if why is None:
            fits = size
        elif size == 1:
            raise why
        else:
            too_large = size
        size = (fits + too_large) // 2
    config = front._process.now
    if config is not None and config.verbose:
        logs.say(f"MemOpt: batch size {fits} is the largest up to {largest} that fits (sizes tried: {trials})")
    return train(fits, *args, **kwargs)


class _Finished:
    """The function ended without an update of a prepared model; `result` is what it returned."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _tried(train: Callable[..., Any], size: int, args: Any, kwargs: Any) -> Exception | _Finished | None:
    """Why the size does not fit; None if it does."""
    gc.collect()  # otherwise objects that the previous trial left in cycles would count
    before = Snapshot(*_roots(train, args, kwargs))
    trial = front._process.trial = _Trial()
    try:
        result = train(size, *args, **kwargs)
    except _UpdateBegins:
        why = None
    except Exception as error:
        if not isinstance(error, InfeasibleError) and not is_out_of_memory(error):
            raise
        why = error.with_traceback(None)  # a traceback would keep the trial's tensors alive
        why.__context__ = None
    else:
        return _unplanned(result, trial)
    finally:
        front._process.trial = None
        trial.end()
    before.restore()
    return why


def _unplanned(result: Any, trial: _Trial) -> _Finished:
    said = "never updated the model that it prepared" if trial.begun else "never called Accelerator.prepare"
    logs.say(f"MemOpt: the batch size is the starting one and was not searched for, because the function {said}.")
    return _Finished(result)


def _roots(train: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """The objects that a trial may change: arguments, variables of functions around it, and Accelerate's state."""
    cells = [cell.cell_contents for cell in getattr(train, "__closure__", None) or () if not _empty(cell)]
    return [private.gradient_state(), *map(private.attributes_of, (*args, *kwargs.values(), *cells))]


def _empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
