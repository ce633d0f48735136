"""Every private name of Lightning that this package uses. No other file uses such a name.

Lightning may rename or remove these names in any release: `tests/cpu/lightning/test_private_api.py` lists the missing
ones. All of them are in Lightning 2.5.0 (the first version that pyproject.toml admits) and 2.6.6.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.fabric.fabric_private import BecomesDDP
from lightning_memopt.integrations.lightnings import ModelParallelStrategy, SingleDeviceStrategy, base_of, part


def accumulates(trainer: Any) -> bool:
    """Whether the batch that just ran only added to the gradients, without an optimizer step.

    `_FitLoop._should_accumulate`: the monitor counts batches and optimizer steps separately.
    """
    return bool(trainer.fit_loop._should_accumulate())


def batches_that_stepped(trainer: Any) -> int:
    """Number of batches that ended with an optimizer step: the step number under which Lightning's own loggers log.

    `_TrainingEpochLoop._batches_that_stepped`: the monitor logs under the same step numbers.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def forget_loaders(trainer: Any) -> None:
    """Make the fit loop build its loaders again, and compute their lengths again.

    `_FitLoop._combined_loader`: the batch scaler changes the batch size after the probe. Lightning's own BatchSizeFinder
    does the same.
    """
    trainer.fit_loop._combined_loader = None


def data_source(trainer: Any) -> Any:
    """The source of the training loaders: `is_defined()`, `dataloader()`.

    `_FitLoop._data_source`: the probe needs the loader before the loop has built it.
    """
    return trainer.fit_loop._data_source


def of_this_rank(trainer: Any, loader: Any) -> Any:
    """The training loader with this rank's share of the samples; the loader itself where the Trainer has one device.

    `_DataConnector._prepare_dataloader` injects a DistributedSampler: the probe needs the loader before the loop has built it.
    """
    training = part(trainer, "trainer.states").RunningStage.TRAINING
    return trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=training)


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """The batch after the user's hook `on_before_batch_transfer`.

    `LightningModule._on_before_batch_transfer`: the probe runs a step without the loop that calls this.
    """
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def lightning_optimizers(strategy: Any) -> list[Any]:
    """The `LightningOptimizer` wrappers of the strategy's optimizers.

    `Strategy._lightning_optimizers`: the probe passes them to `LightningModule.optimizer_step`, as the loop does.
    """
    return list(strategy._lightning_optimizers)


def ends_fit(trainer: Any) -> BaseException:
    """What ends `trainer.fit` when it is raised: everything is torn down, and the fit counts as finished.

    `_TunerExitException`: no other exception leaves a fit without an error and without callbacks that write checkpoints.
    """
    ends: BaseException = part(trainer, "utilities.exceptions")._TunerExitException()
    return ends


def detects_anomalies(trainer: Any) -> bool:
    """Whether the Trainer was created with `detect_anomaly=True`.

    `Trainer._detect_anomaly`: updates in backward are refused then.
    """
    return bool(trainer._detect_anomaly)


_SINGLE = ("accelerator", "checkpoint_io", "precision_plugin")
"""The arguments of `SingleDeviceStrategy` other than its device. `DDPStrategy` has them, too."""


class OneDeviceStrategy(BecomesDDP, SingleDeviceStrategy):
    """A `SingleDeviceStrategy` that takes its device from the Trainer, and becomes a DDP strategy for several devices.

    Args:
        device: the training device; None: the Trainer's.
        kwargs: arguments of `SingleDeviceStrategy`, and those of `parallel`, which are used only for several devices.
    """

    _arguments = _SINGLE
    _kept = ("_layer_sync", "num_nodes", "memopt_config", "fit_only")

    def __init__(self, device: str | torch.device | None = None, **kwargs: Any) -> None:
        parallel_kwargs = {name: value for name, value in kwargs.items() if name not in _SINGLE}
        self._refuse_unknown(parallel_kwargs)
        single_kwargs = {name: value for name, value in kwargs.items() if name in _SINGLE}
        super().__init__(device="cpu" if device is None else device, **single_kwargs)
        self._start_on_one_device(device, parallel_kwargs)
        self.num_nodes = 1
        self._layer_sync: Any = None

    def _become_parallel(self) -> None:
        super()._become_parallel()
        self.set_world_ranks()  # type: ignore[attr-defined]

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        """Raise TypeError, as Python does, for an argument that neither DDPStrategy nor DistributedDataParallel has."""
        of_strategy = signature(base_of(self.parallel).__init__).parameters
        known = {*of_strategy, *signature(DistributedDataParallel.__init__).parameters}
        for name in kwargs:
            if name not in known - {"self", "kwargs", "module"}:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")


class ShardedStrategy(ModelParallelStrategy):
    """A `ModelParallelStrategy` that by default uses all processes for data parallelism.

    Lightning's default splits weights over the processes of a node for tensor parallelism. It reads the sizes from
    `_data_parallel_size` and `_tensor_parallel_size` when it makes the mesh, because only then the number of processes is
    known.

    Args:
        kwargs: arguments of `ModelParallelStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all_for_data = not {"data_parallel_size", "tensor_parallel_size"} & kwargs.keys()

    def setup_environment(self) -> None:
        if self._all_for_data:
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
