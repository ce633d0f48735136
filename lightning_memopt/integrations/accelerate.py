"""Accelerate: the objects that `Accelerator.prepare` returns are Accelerate's own, and train within a memory budget.

`prepare(accelerator, ...)` asks for a budget for one call; the launcher (launch.py) asks for every Accelerator of its process.
From then on methods of the class `Accelerator` are replaced. For an Accelerator without a budget they do what the originals do.
A prepared model, and the prepared optimizers that have parameters of it, make a run. The run ends with `free_memory` or
`end_training` of its Accelerator, when a new optimizer is prepared for its model, and at the end of the process. Then its table
is logged.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lightning_memopt import logs
from lightning_memopt.config import MemOptConfig, config_of, disabled
from lightning_memopt.errors import RankFailedError, UnsupportedError
from lightning_memopt.integrations import accelerate_private as private
from lightning_memopt.integrations import wire
from lightning_memopt.integrations.plain import Run, open_run, unwrapped
from lightning_memopt.integrations.to_device import make_room
from lightning_memopt.record import updates_any
from lightning_memopt.record.gathered import units_of
from lightning_memopt.runtime.early_updates import Reason

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_memopt.config import Options
    from lightning_memopt.session import Session

_REFUSED = {
    "DEEPSPEED": "DeepSpeed partitions and updates parameters by itself",
    "MEGATRON_LM": "Megatron-LM runs forward, backward and the update by itself",
    "FSDP": "this is FSDP1, whose flat weights no rebuild can start from; FSDP2 (fsdp_version: 2) is supported",
    "TP": "tensor parallelism has distributed tensors as weights",
    "XLA": "XLA runs a step as one program, whose ops cannot be observed",
}
"""Distributed types of Accelerate that are refused, each with the reason."""


class Trial(Protocol):
    """A training that is started only to see whether a batch size fits (accelerate_batch_size.py)."""

    def config(self, config: MemOptConfig) -> MemOptConfig:
        """The options of the trial's runs. `config`: those of the training."""

    def began(self, watched: Watched) -> None:
        """A run was opened."""


class Watched:
    """An Accelerator and what it has prepared.

    accelerator: a weak reference.
    config: the options of its runs.
    preparing: number of its nested `prepare` methods that are running.
    models: the prepared models.
    optimizers: the prepared optimizers, without Accelerate's wrapper.
    runs: id of a model -> its open run.
    """

    def __init__(self, accelerator: Any, config: MemOptConfig) -> None:
        self.accelerator = weakref.ref(accelerator)
        self.config = config
        self.preparing = 0
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.runs: dict[int, Run] = {}
        self._say = logs.say if accelerator.is_local_main_process else logs.silent
        self._scales = accelerator.scaler is not None

    def saw(self, prepared: Any) -> None:
        """A model or an optimizer was prepared. A model replaces one with the same parameters (in another wrapper)."""
        if isinstance(prepared, nn.Module):
            same = _parameters(prepared)
            for model in [m for m in self.models if m is prepared or (same and _parameters(m) == same)]:
                self.models.remove(model)
                if model is not prepared:
                    self._end(model)
            self.models.append(prepared)
        elif isinstance(prepared, torch.optim.Optimizer):
            (optimizer,) = unwrapped(prepared)
            if not any(optimizer is o for o in self.optimizers):
                self.optimizers.append(optimizer)

    def plan(self) -> None:
        """Open a run for every prepared model that an optimizer trains and that is not part of another one."""
        trained: list[tuple[nn.Module, list[torch.optim.Optimizer]]] = []
        for model in self.models:
            own = _parameters(model)
            optimizers = [o for o in self.optimizers if updates_any(o, own)]
            if optimizers:
                trained.append((model, optimizers))
        for model, optimizers in trained:
            run = self.runs.get(id(model))
            if run is not None and list(map(id, run.session.optimizers)) == list(map(id, optimizers)):
                continue
            if any(_parameters(model) < _parameters(whole) for whole, _ in trained):
                self._end(model)
                continue
            for watched in _process.watched:
                watched._end(model)
            run = self.runs[id(model)] = open_run(model, optimizers, self.config, self._say, self._reasons)
            _process.sessions.add(run.session)
            _process.planned = True
            if _process.trial is not None:
                _process.trial.began(self)

    def end(self, last: bool = False, called: bool = False) -> None:
        """End all runs, and forget what was prepared.

        last: whether the process ends.
        called: whether the loop, or the end of the process, ends them: see `History.ends`.
        """
        for model in tuple(self.models):
            self._end(model, last, called)
        self.models.clear()
        self.optimizers.clear()

    def _end(self, model: nn.Module, last: bool = False, called: bool = False) -> None:
        run = self.runs.pop(id(model), None)
        if run is None:
            return
        if called:
            run.session.history.ends(handled=True)
        run.close()
        status = run.status()
        trained = status.phase not in ("observing", "waiting") or status.observed_steps or status.reason is not None
        if self.config.verbose and (trained or last):
            name = f"MemOpt: {type(model).__name__}\n" if len(self.models) > 1 else ""
            self._say(name + run.report())

    def _reasons(self) -> list[Reason]:
        reasons = []
        if self._scales:
            reasons.append(Reason("a GradScaler first checks all gradients for infinities", "Use mixed_precision='bf16'"))
        if len(self.runs) > 1:
            what = "the Accelerator has prepared several models, and it is not known which of them a backward is for"
            reasons.append(Reason(what, "Train one model with each Accelerator"))
        return reasons

    @contextlib.contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around `Accelerator.backward`. `last`: an update follows it."""
        with contextlib.ExitStack() as stack:
            for run in self.runs.values():
                stack.enter_context(run.naming(collectives=True))
                if last:
                    stack.enter_context(run.last_backward())
            yield


class _Process:
    """The options and runs of this process.

    always: the launcher's options, for every Accelerator of the process; None without the launcher.
    now: the options for the call of `prepare` that is running.
    planned: whether a run was opened.
    trial: the trial of a batch size that is running, or None.
    sessions: weak references to the sessions of all Accelerators' runs, including closed ones.
    """

    def __init__(self) -> None:
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.trial: Trial | None = None
        self.always: MemOptConfig | None = None
        self.now: MemOptConfig | None = None
        self.planned = False
        self.watched: list[Watched] = []
        self._ends_in = 0

    def watch(self, accelerator: Any, config: MemOptConfig) -> Watched:
        """Watch an Accelerator from now on. Runs of Accelerators that were freed end."""
        if self._ends_in != os.getpid():  # a forked process does not end the runs of its parent
            self._ends_in = os.getpid()
            self.watched = []
            Finalize(None, self.end, exitpriority=100)  # multiprocessing may end a process without `atexit`
        known = self.find(accelerator)
        if known is not None:
            return known
        for watched in [w for w in self.watched if w.accelerator() is None]:
            watched.end()
            self.watched.remove(watched)
        self.watched.append(Watched(accelerator, config))
        return self.watched[-1]

    def find(self, accelerator: Any) -> Watched | None:
        """The watched Accelerator, or None if it is not watched."""
        return next((w for w in self.watched if w.accelerator() is accelerator), None)

    def raised(self, error: BaseException) -> bool:
        """Whether the session of an Accelerator's run raised this error, not a session of another front in this process."""
        sessions = set(map(id, self.sessions))
        return any(id(frame.f_locals.get("self")) in sessions for frame, _ in traceback.walk_tb(error.__traceback__))

    def end(self) -> None:
        """End the runs of all Accelerators."""
        while self.watched:
            self.watched.pop().end(last=True, called=True)


_process = _Process()


def prepare(
    accelerator: Any,
    *objects: Any,
    device_placement: list[bool] | None = None,
    config: MemOptConfig | None = None,
    **options: Unpack[Options],
) -> Any:
    """`accelerator.prepare(*objects)` for training within a memory budget. The loop itself is unchanged.

    The returned objects are Accelerate's own. Models without an optimizer are left alone. If there are several models, each has
    its own plan, and they share the budget, which is for the whole process. The table is logged on the main process when
    `free_memory` or `end_training` is called, or else at the end of the process. Scripts under `accelerate-memopt launch` do
    not need to call this.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: models, optimizers, loaders and schedulers, as for `Accelerator.prepare`.
        device_placement: as for `Accelerator.prepare`.
        config: all options in one object.
        options: those of `MemOptConfig`. Options that are not given are taken from the launcher.

    Raises:
        UnsupportedError: the Accelerator distributes a model in a way that is not supported. Nothing has been prepared.
        InfeasibleError: raised in the training loop, as by `optimize`.
    """
    if config is None:
        config = config_of(None, {**launched_options(), **options})
    else:
        config = config_of(config, options)
    _install()
    before, _process.now = _process.now, config
    try:
        return accelerator.prepare(*objects, device_placement=device_placement)
    finally:
        _process.now = before


def launched_options() -> dict[str, Any]:
    """The options that this package's launcher was given; empty if another launcher started this process."""
    return wire.options_of(wire.in_environment(os.environ) or {})


def watch(config: MemOptConfig) -> None:
    """From now on, every Accelerator of this process prepares models that train within the budget of `config`."""
    _install()
    _process.always = config


def end() -> bool:
    """End all runs, and log their tables. Returns whether there has been a run in this process."""
    _process.end()
    return _process.planned


def ended_by(error: BaseException) -> RankFailedError | None:
    """The script ends with an error. Returns the error to raise instead if another rank failed first, else None."""
    for watched in _process.watched:
        for run in watched.runs.values():
            failed = run.session.ended_by(error)
            if failed is not None:
                return failed
    return None


def refuse(accelerator: Any, objects: tuple[Any, ...]) -> None:
    """Raise UnsupportedError if `accelerator` would run one of these objects in a way that is not supported."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    parallel = getattr(accelerator, "parallelism_config", None)
    split = [name for name in ("tp", "cp", "sp") if getattr(parallel, f"{name}_enabled", False)]
    name, reason = kind, None if private.shards(accelerator) else _REFUSED.get(kind)
    if reason is None and private.shards(accelerator) and getattr(parallel, "dp_replicate_enabled", False):
        name, reason = "parallelism_config with dp_replicate_size", "copies of a sharded model (hybrid sharding) are two meshes"
    if reason is None and split:
        name, reason = f"parallelism_config with {split[0]}_size", "it splits one step over several devices"
    if reason is None and accelerator.mixed_precision == "fp8":
        name, reason = "mixed_precision='fp8'", "the scales of fp8 change with every run of an op"
    for model in objects:
        if reason is None and isinstance(model, nn.Module) and accelerator.verify_device_map(model):
            name, reason = "a model with a device_map", "its weights move between devices within a step"
    if reason is not None:
        raise UnsupportedError(
            f"MemOpt cannot plan {name} under Accelerate: {reason}. Use one device or distributed data parallel; or train "
            "without a plan: set MEMOPT_DISABLE=1, or use the stock `accelerate launch`."
        )


def _parameters(model: nn.Module) -> set[int]:
    return set(map(id, model.parameters()))


def _install() -> None:
    private.replace(
        {
            "prepare": _preparing,
            "prepare_model": _preparing,
            "prepare_optimizer": _preparing,
            "backward": _backward,
            "free_memory": _ending,
            "end_training": _ending,
        },
        ours=_process.raised,
    )


def _preparing(name: str, method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    config = _process.now or _process.always
    if config is not None and _process.trial is not None:
        config = _process.trial.config(config)
    evaluates = name == "prepare_model" and (kwargs.get("evaluation_mode") or args[2:3] == (True,))
    if config is None or evaluates or disabled():
        return method(accelerator, *args, **kwargs)
    watched = _process.watch(accelerator, config)
    outermost = not watched.preparing
    if outermost:
        watched.config = config
        refuse(accelerator, args)
    watched.preparing += 1
    try:
        if name == "prepare_model" and accelerator.device_placement and accelerator.num_processes == 1:
            make_room(args[0] if args else kwargs["model"], accelerator.device, config, watched._say)
        result = method(accelerator, *args, **kwargs)
    finally:
        watched.preparing -= 1
    if name != "prepare":
        watched.saw(result)
    else:
        for prepared in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(prepared, nn.Module) and units_of(prepared):  # `prepare_model` is not called for a sharded model
                watched.saw(prepared)
    if outermost:
        watched.plan()
    return result


def _backward(name: str, method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    watched = _process.find(accelerator)
    if watched is None:
        return method(accelerator, *args, **kwargs)
    with watched.backward(last=accelerator.sync_gradients):
        return method(accelerator, *args, **kwargs)


def _ending(name: str, method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    watched = _process.find(accelerator)
    if watched is not None:
        watched.end(called=True)
    return method(accelerator, *args, **kwargs)
