"""A training script that is asked about: it runs without computing its tensors, up to its fourth update, and is left there.

Its model and optimizers are found while it runs. The first updates show which optimizers there are, and which modules are
called from outside of any other module while gradients are on. From then on, it is observed like any loop in `optimize`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memopt.bench import user_code
from lightning_memopt.device.pretending import cuda_is_here
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.card_types import card_types
from lightning_memopt.fitting.operators import update_together
from lightning_memopt.fitting.patience import LIMIT_SECONDS, Patience
from lightning_memopt.fitting.recording import Observed, Watching
from lightning_memopt.integrations.asking import STEPS
from lightning_memopt.integrations.entries import trains

if TYPE_CHECKING:
    from lightning_memopt.fitting.tiling import InTiles
    from lightning_memopt.fitting.unfilled import Unfilled

_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "mpirun", "srun")
_LAUNCHING = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "lightning_memopt.launch")
"""Commands, and modules, that start other processes."""
_PATIENCE = 1000
"""Maximum number of forwards from update to update. A script that trains by other means than an optimizer may never end,
because no loss falls."""
_SELDOM = 32
"""Number of updates after which an optimizer that has not stepped is taken to be unused, and a script that has called no module
is taken to call none."""


class _Recorded(BaseException):
    """Leaves the script. Scripts catch exceptions, so it is none."""


def script_of(command: Sequence[str]) -> tuple[str, list[str], bool]:
    """(script, its arguments, whether it is the name of a module) of a command: `python train.py ...`, `python -m train ...`.

    Raises ConfigError if the command runs no script by Python.
    """
    words = list(command)
    launcher = words[0] if words and words[0].rpartition("/")[2] in _LAUNCHERS else ""
    if words and words[0].rpartition("/")[2].startswith("python"):
        del words[0]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            del words[: 2 if words[0] in ("-W", "-X") else 1]
    module = words[:1] == ["-m"]
    if module:
        del words[0]
    if launcher or (module and words and words[0] in _LAUNCHING):
        raise ConfigError(
            f"{launcher or words[0]} starts other processes, which cannot be recorded. Give `python` and the script itself."
        )
    if not words or words[0].startswith("-"):
        raise ConfigError(f"{' '.join(command)!r} names no script. Give `python train.py` and its arguments.")
    return words[0], words[1:], module


def observed(
    command: Sequence[str],
    name: str = "",
    nbytes: int = 0,
    *,
    mode: Unfilled,
    early: bool = False,
    checkpoints: bool = False,
    tiles: InTiles | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Observed:
    """The last of a few steps of a script.

    name, nbytes: of the CUDA device that it finds; without a name, it trains on the CPU.
    mode: is on.
    early: parameters are updated in backward, as far as the script allows it.
    checkpoints: what it checkpoints stays, or is turned on in a model of transformers.
    tiles: its loss head runs in these.
    limit_seconds: how long it may run.

    Raises ConfigError if the script ends, or raises, before that; if its time is up; and if it trains in other processes.
    """
    from lightning_memopt.integrations.launch import run

    script, arguments, module = script_of(command)
    loop, ended = _Loop(mode, bool(name), early, checkpoints, tiles), "ended"
    patience = Patience(script, limit_seconds, loop.leave_late, lambda: (loop.updates, loop.wanted))
    doing = f"{script}, run without its values,"
    remedy = "Run it by itself. If it trains, values that were not computed steer it: give package.module:function"
    eager = torch.compiler.set_stance("force_eager")  # it imports Dynamo, which keeps the `Module.__call__` that it finds
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_main())
        stack.enter_context(eager)
        if name:
            stack.enter_context(cuda_is_here(name, nbytes))
            stack.enter_context(card_types(mode))
        stack.enter_context(loop.watched())
        stack.enter_context(mock.patch.object(mode, "look", patience.look))
        try:
            with user_code.in_user_code(doing, remedy), _not_by_values(doing), contextlib.redirect_stdout(sys.stderr):
                run(script, arguments, module)
        except _Recorded:
            pass
        except ConfigError as error:
            if not isinstance(error.__cause__, SystemExit):
                raise
            ended = f"exited with {error.__cause__.code!r}" if error.__cause__.code else ended
    if loop.is_late:
        raise patience.error(mode.ops)
    if loop.starts_trainers:
        raise ConfigError(
            f"{script} trains in processes that it starts, and what runs there cannot be recorded. Make it train in one "
            "process, or give package.module:function."
        )
    if loop.has_forwards and (loop.is_stuck or not loop.updates):
        raise ConfigError(
            f"{script} ran {loop.forwards} forwards without a call of optimizer.step(), and nothing else ends a step. Give "
            "package.module:function."
        )
    if loop.updates and not loop.has_forwards:
        raise _no_model()
    if not loop.is_done:
        raise ConfigError(
            f"{script} {ended} after {loop.updates} updates; {loop.wanted} are needed. Give it more steps, or epochs."
        )
    assert loop.observed is not None
    return loop.observed


@contextlib.contextmanager
def _not_by_values(doing: str) -> Iterator[None]:
    """Says what to do about errors that have nothing to do with values: no package, no file, no network, no other process."""
    try:
        yield
    except (ImportError, OSError):
        with user_code.in_user_code(doing):
            raise
    except RuntimeError as error:
        if "NCCL" not in str(error):
            raise
        with user_code.in_user_code(doing, "Run it in one process, without torch.distributed"):
            raise


@contextlib.contextmanager
def _as_main() -> Iterator[None]:
    """Undoes what running a script changes in the interpreter."""
    main = sys.modules["__main__"]
    with mock.patch.object(sys, "argv", sys.argv), mock.patch.object(sys, "path", list(sys.path)):
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _trains(process: Any) -> bool:
    """Whether a process that is to be started will train: it gets a model, or is one of `torch.multiprocessing.spawn`. Those
    that load data may have models within their data.
    """
    target = getattr(process, "_target", None)
    if getattr(target, "__module__", "") == "torch.multiprocessing.spawn":
        return True
    given = (*getattr(process, "_args", ()), *getattr(process, "_kwargs", {}).values())
    return any(isinstance(value, nn.Module) and trains(value) for value in given)


def _no_model() -> ConfigError:
    return ConfigError(
        "the script called no module that has what its optimizers update, so there is no model to plan. Give "
        "package.module:function."
    )


class _Loop:
    """The training loop of a script: finds its model and its optimizers, then observes it.

    observed: its last step, as soon as the loop was left.
    updates: number of calls of `optimizer.step()` so far.
    forwards: number of calls of modules that train since the last update.
    has_forwards: whether a module that trains was called.
    is_late: whether it was left because its time was up.
    starts_trainers: whether it was left because it gives a model to another process.
    """

    def __init__(self, mode: Unfilled, cuda: bool, early: bool, checkpoints: bool, tiles: InTiles | None) -> None:
        self._steps, self._mode = STEPS, mode  # the number of steps that are still to be recorded
        self._cuda, self._before_nbytes = cuda, mode.host_nbytes
        self._early, self._checkpoints = early, checkpoints
        self._tiles = tiles
        self._saw_begin = True
        self._made = weakref.WeakSet[Optimizer]()
        self._optimizers: list[Optimizer] = []
        self._called: dict[nn.Module, None] = {}  # in the order of their calls
        self._is_known = False
        self._depth = 0
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._watching: Watching | None = None
        self._updating = False
        self.forwards = 0
        self.observed: Observed | None = None
        self.updates = 0
        self.has_forwards = self.is_late = self.starts_trainers = False

    @property
    def is_stuck(self) -> bool:
        return self.forwards >= _PATIENCE

    @property
    def is_done(self) -> bool:
        return self._steps == 0

    @property
    def wanted(self) -> int:
        """Number of updates after which the script is left, if no optimizer steps more often than another."""
        return max((2 + STEPS) * max(1, len(self._made)), self.updates + 1)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, updates and calls of modules are seen."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or os.getpid() != self._process:  # a loader's
                return original(module, *args, **kwargs)
            if self._depth == 0 and torch.is_grad_enabled() and module.training and trains(module):
                self._forward(module)
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        made = Optimizer.__init__

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        starts = BaseProcess.start

        def start(process: Any) -> None:
            if os.getpid() == self._process and _trains(process):
                self.starts_trainers = True
                raise _Recorded
            starts(process)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Optimizer, "__init__", make))
            stack.enter_context(mock.patch.object(BaseProcess, "start", start))
            stack.callback(register_optimizer_step_pre_hook(self._update_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self._update_ended).remove)
            stack.enter_context(mock.patch.object(nn.Module, "__call__", call))
            stack.callback(self.close)
            yield

    def leave_late(self) -> None:
        """Leave the script, because its time is up."""
        self.is_late = True
        raise _Recorded

    def close(self) -> None:
        """End the observation. What was recorded is in `observed`. Afterwards, forwards are none of the loop's, even if a
        library that was imported within keeps calling the replaced `Module.__call__`.
        """
        if self._watching is not None:
            # on the CPU, all that the script made is on the device
            host_nbytes = self._mode.host_nbytes if self._cuda else self._before_nbytes
            if not self.is_late:
                self.observed = self._watching.observed(host_nbytes, self._cuda)
            self._watching.close()
        self._watching, self._thread = None, 0
        self._called.clear()
        self._optimizers.clear()

    def _forward(self, module: nn.Module) -> None:
        """A module is called from outside of all others."""
        self.forwards += 1
        self.has_forwards = True
        if self.is_done or self.is_stuck:
            raise _Recorded
        if self._watching is None:
            self._called[module] = None
            if self._is_known:
                self._observe()

    def _update_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updating = True

    def _update_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.updates += 1
        self.forwards = 0
        if self.updates > _SELDOM and not self.has_forwards:
            raise _Recorded
        if self._watching is None:
            self._find(optimizer)
        elif optimizer is self._optimizers[-1]:
            self._steps -= self._saw_begin
            self._saw_begin = True
        self._updating = False

    def _find(self, optimizer: Optimizer) -> None:
        """All optimizers are known when all that the script made have stepped, and the last one steps again. One that has not
        stepped for long may never do.
        """
        if not any(optimizer is known for known in self._optimizers):
            if self._cuda:
                update_together([optimizer])
            self._optimizers.append(optimizer)
        else:
            waits = self.updates < _SELDOM and any(all(o is not known for known in self._optimizers) for o in self._made)
            self._is_known = self._is_known or (optimizer is self._optimizers[-1] and not waits)

    def _observe(self) -> None:
        self._saw_begin = not self._updating  # not if this forward is in the closure of an update
        self._watching = Watching(self._model(), self._optimizers, self._mode, self._early, self._checkpoints, self._tiles)

    def _model(self) -> nn.Module:
        """The module that was called, or a list of them. Raises ConfigError if none of them has what is trained."""
        trained = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        models = [m for m in self._called if any(id(p) in trained for p in m.parameters())]
        if not models:
            raise _no_model()
        return models[0] if len(models) == 1 else nn.ModuleList(models)
