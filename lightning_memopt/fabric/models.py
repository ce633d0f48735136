"""The models that a Fabric strategy has set up. Each model that is trained has a run, from its `setup` until it is freed.

Fabric's loop is the user's own, so a run is that of `optimize`: it is told of every call of the module that Fabric calls (the
module itself, or the DDP module around it) and of every update of the optimizers. It begins when Fabric has wrapped the model
and set up an optimizer of its parameters, in either order. It ends when the loop drops the wrapper, when the strategy is torn
down, or at the exit of the process. Then its table is logged.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError
from lightning_memopt.fabric import fabric_private
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.plain import Run, in_rounds, open_run
from lightning_memopt.record import updates_any


class Model:
    """A model that was set up.

    module: what the strategy gave to Fabric: the user's module, or the DDP module around it.
    called: what Fabric's wrapper calls: `module`, or its compiled form; None until Fabric has wrapped it.
    optimizers: the optimizers that train it. A run begins with the first of them.
    run: its run; None before it begins.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.called: nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.run: Run | None = None

    def has_any_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has parameters of this model."""
        own = set(map(id, self.module.parameters()))
        return updates_any(optimizer, own)

    def begin(self, config: MemOptConfig) -> None:
        """Begin a run if the model is trained. A run that began without one of the optimizers begins again."""
        if self.called is None or not self.optimizers:
            return
        self.end(say=False)
        self.run = open_run(self.called, self.optimizers, config, rank_zero_say)

    def end(self, say: bool, called: bool = False) -> None:
        """End the run if there is one.

        say: log its table.
        called: whether the loop, or the end of the process, ends it: see `History.ends`.
        """
        run, self.run = self.run, None
        if run is None:
            return
        if called:
            run.session.history.ends(handled=True)
        run.close()
        if say and run.session.config.verbose:
            rank_zero_say(run.report())


class Models:
    """All models of a strategy. The strategy refers to this object, which does not refer to the strategy."""

    def __init__(self, config: MemOptConfig, wrappers: type[Any]) -> None:
        """`wrappers`: the class of what Fabric's `setup` returns."""
        self.config = config
        self._models: list[Model] = []
        self._wrapped: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that were set up without a model
        self._known: weakref.WeakSet[torch.optim.Optimizer] = (
            weakref.WeakSet()
        )  # those of a model, and those for which there was a warning
        self._undo = contextlib.ExitStack()
        self._listen(wrappers)

    # -- what is set up ----------------------------------------------------------------------------

    def add(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A module was set up, together with these optimizers."""
        model = Model(module)
        model.optimizers = [*optimizers, *(o for o in self._alone if model.has_any_of(o))]
        self._known.update(model.optimizers)
        self._models.append(model)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was set up alone. It belongs to every model whose parameters it has."""
        self._alone.add(optimizer)
        for model in self._models:
            if model.has_any_of(optimizer):
                self._known.add(optimizer)
                model.optimizers.append(optimizer)
                model.begin(self.config)

    def _listen(self, wrappers: type[Any]) -> None:
        this = weakref.ref(self)

        def told(wrapper: nn.Module, called: nn.Module) -> None:
            models = this()
            if models is not None:
                models._wraps(wrapper, called)

        def around(wrapper: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
            models = this()
            model = None if models is None else models._wrapped.get(wrapper)
            return method if model is None or model.run is None else in_rounds(model.run, method)

        def after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            models = this()
            if models is not None and optimizer not in models._known:
                models._stranger(optimizer)

        # hidden from dynamo, which would trace it in a compiled step
        self._undo.callback(register_optimizer_step_post_hook(torch.compiler.disable(after_update)).remove)
        self._undo.enter_context(fabric_private.told_of_wrappers(wrappers, told))
        self._undo.enter_context(fabric_private.around_step_methods(wrappers, around))

    def _wraps(self, wrapper: nn.Module, called: nn.Module) -> None:
        module = getattr(called, "_orig_mod", called)  # torch.compile's
        for model in [model for model in self._models if model.module is module]:
            if model.called is not None:
                model.end(say=True)  # a module that is set up again gets a new run with the new optimizers
            else:
                model.called = called
                self._wrapped[wrapper] = model
                weakref.finalize(wrapper, self._drop, model).atexit = False
                model.begin(self.config)

    def _stranger(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer without a run has stepped: warn once if it was set up by this Fabric, or has a model's parameters."""
        self._known.add(optimizer)
        if optimizer in self._alone or any(model.has_any_of(optimizer) for model in self._models):
            warnings.warn(
                f"MemOpt: there is no plan for what {type(optimizer).__name__} trains, because Fabric was not given both this "
                "optimizer and the model whose parameters it has. Give both to fabric.setup.",
                stacklevel=2,
            )

    def _drop(self, model: Model) -> None:
        """The model was freed."""
        if model in self._models and not sys.is_finalizing():
            self._models.remove(model)
            model.end(say=True)

    # -- what was set up ---------------------------------------------------------------------------

    def run(self, wrapper: Any = None) -> Run:
        """The run of a model that `fabric.setup` returned or, by default, of the only model that has a run."""
        runs = [model.run for model in self._models if model.run is not None]
        if wrapper is not None:
            wrapper = getattr(wrapper, "_orig_mod", wrapper)
            model = self._wrapped.get(wrapper)
            if model is None or model.run is None:
                raise ConfigError(
                    f"There is no run of this {type(wrapper).__name__}. Give the model that fabric.setup(model, optimizer) "
                    "returned; a run begins when an optimizer of its parameters is set up, too."
                )
            return model.run
        if len(runs) != 1:
            raise ConfigError(
                f"{len(runs)} models of this strategy have a run. Call fabric.setup(model, optimizer) first, and give the "
                "model that it returned if there are several."
            )
        return runs[0]

    def close(self, called: bool = False) -> None:
        """End all runs, and log their tables. The models train plainly from then on. `called`: as for `Model.end`."""
        models, self._models = self._models, []
        self._undo.close()
        for model in models:
            model.end(say=True, called=called)
