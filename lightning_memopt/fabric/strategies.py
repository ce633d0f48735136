"""Fabric's strategies within a memory budget: on one device, and DDP; registered as "memopt" and "memopt_ddp"."""

from __future__ import annotations

import abc
import weakref
from dataclasses import fields
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig, config_of, with_option_texts
from lightning_memopt.fabric.fabric_private import OneOrSeveralDevices, wrapper_class
from lightning_memopt.fabric.models import Models
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.lightnings import FabricDDPStrategy, shown
from lightning_memopt.integrations.plain import Run
from lightning_memopt.integrations.to_device import make_room


class MemOptFabricMixin(abc.ABC):
    """Keeps training steps within the budget of `memopt_config`. Models that are not trained run unchanged.

    memopt_config: the options.
    """

    memopt_config: MemOptConfig
    _models: Models | None = None
    _jointly = False
    """Whether optimizers are being set up together with their module."""

    def __init__(self, *args: Any, config: MemOptConfig | None = None, **options: Any) -> None:
        """`options`: those of `MemOptConfig`, and those of Fabric's own strategy."""
        names = {field.name for field in fields(MemOptConfig)}
        self.memopt_config = config_of(config, {name: options.pop(name) for name in tuple(options) if name in names})
        super().__init__(*args, **options)

    # -- lifecycle ---------------------------------------------------------------------------------

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
        self._jointly = True
        try:
            result = super().setup_module_and_optimizers(module, optimizers, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._jointly = False
        self._opened().add(result[0], result[1])
        return result

    def setup_module(self, module: nn.Module) -> Any:
        result = super().setup_module(module)  # type: ignore[misc]
        if not self._jointly:
            self._opened().add(result, ())
        return result

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        result: torch.optim.Optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        if not self._jointly:
            self._opened().add_optimizer(result)
        return result

    def _opened(self) -> Models:
        if self._models is None:
            self._models = Models(self.memopt_config, wrapper_class(self))
            weakref.finalize(self, self._models.close)  # also runs at the exit of the process
            # multiprocessing ends its processes without `atexit`, while it still handles the error that ended them
            Finalize(self._models, _process_ends, (weakref.ref(self._models),), exitpriority=100)
        return self._models

    def close(self) -> None:
        """End all runs, and log their tables. The models train plainly from then on."""
        models, self._models = self._models, None
        if models is not None:
            models.close(called=True)

    def teardown(self) -> None:
        try:
            self.close()
        finally:
            super().teardown()  # type: ignore[misc]

    def __repr__(self) -> str:
        return shown(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of the strategy, or of its Fabric, has not set up any model."""
        return {name: value for name, value in vars(self).items() if name != "_models"}

    # -- results -----------------------------------------------------------------------------------

    def run(self, model: nn.Module | None = None) -> Run:
        """The run of a model: its status, report, frontier, plan file and controls.

        Args:
            model: the model that `fabric.setup` returned; needed if several models are trained.

        Raises:
            ConfigError: the model has no run, or none was given and not exactly one has a run.
        """
        return (self._models or Models(self.memopt_config, wrapper_class(self))).run(model)


def _process_ends(reference: weakref.ref[Models]) -> None:
    models = reference()
    if models is not None:
        models.close(called=True)


@with_option_texts
class MemOptFabricDDPStrategy(MemOptFabricMixin, FabricDDPStrategy):
    """Train by DistributedDataParallel, each process within a memory budget. Other arguments are those of Fabric's DDPStrategy.

    Args:
        config: all of these options in one object, instead of single ones. Raises ConfigError if both are given.
    """


@with_option_texts
class MemOptFabricStrategy(MemOptFabricMixin, OneOrSeveralDevices):
    """Train on one device within a memory budget. If Fabric has several devices, this becomes a `MemOptFabricDDPStrategy`.

    Args:
        device: the training device; Fabric's if left out.
        config: all of these options in one object, instead of single ones. Raises ConfigError if both are given.
    """

    parallel = MemOptFabricDDPStrategy

    def module_to_device(self, module: nn.Module) -> None:
        make_room(module, self.root_device, self.memopt_config, rank_zero_say)
        super().module_to_device(module)
