"""`MemOptBatchScaler`: choose the batch size for a budget before training starts, and before schedules are built.

The search runs when Lightning creates the optimizers (`Strategy.setup_optimizers`): with temporary optimizers, on real batches,
without callbacks, loggers or loops, inside `untouched`. Afterwards the final optimizers are created, with the number of steps
known. The size is set on the loader's batch sampler when Lightning passes the loader to the strategy
(`Strategy.process_dataloader`), before the loop computes its length, and restored at the end.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memopt.batching import MODES, BatchSizeResult, FromLoader, Mode, Search, refuse_loader, untouched
from lightning_memopt.callbacks import probe
from lightning_memopt.callbacks.learning_rate import FACTORS, scale
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.lightnings import Callback, part
from lightning_memopt.session.budget import bytes_on
from lightning_memopt.strategies import MemOptMixin, lightning_private

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

LrScaling = Literal["none", "linear", "sqrt"]


class _Replacement:
    """Replaces the method `name` of `holder` by `call`. A copy or pickle of the holder has the original method again."""

    def __init__(self, holder: Any, name: str, call: Callable[..., Any]) -> None:
        self._holder, self._name, self._call = holder, name, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # `getattr` runs on the copy before its instance attributes are set, so it gives the method of the copy's class
        return getattr, (self._holder, self._name)


class MemOptBatchScaler(Callback):
    """Choose the training batch size before training starts, by a few real steps whose effects are all restored.

    With DDP all ranks search together: each rank trains on batches of the size that fits on every rank.

    Args:
        mode: `"largest"`: the largest size that fits; `"throughput"`: the most samples a second; `"energy"`: the fewest joules
            a sample.
        budget: bytes of the device that a step may use. Only for other strategies than `MemOptStrategy` and
            `MemOptDDPStrategy`, which have their own.
        max_size: the largest size that may be chosen.
        keep_effective: keep the number of samples between two updates, of each rank and so of all, by changing
            `accumulate_grad_batches`. Only sizes that divide this number are chosen. False: accumulation stays, and an update
            has more samples.
        lr_scaling: how to scale learning rates if `keep_effective=False`: not, by the ratio of samples an update, or by the
            square root of that ratio.
        watts: power that the device draws in training, for `"energy"`. By default it is measured, on NVIDIA GPUs.
        verbose: log what was chosen, and the result again at the end.

    Attributes:
        result: what the search found; None before it, and if a checkpoint gave the size.
    """

    def __init__(
        self,
        mode: Mode = "largest",
        budget: int | float | str | None = None,
        max_size: int | None = None,
        keep_effective: bool = True,
        lr_scaling: LrScaling = "none",
        watts: float | None = None,
        verbose: bool = True,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; use {', '.join(map(repr, MODES))}.")
        if lr_scaling not in FACTORS:
            raise ConfigError(f"lr_scaling is {lr_scaling!r}; use {', '.join(map(repr, FACTORS))}.")
        if keep_effective and lr_scaling != "none":
            raise ConfigError(
                f"lr_scaling={lr_scaling!r} has nothing to scale: keep_effective=True keeps the samples an update as they are. "
                "Set keep_effective=False, or leave lr_scaling out."
            )
        self.mode, self.budget, self.max_size = mode, budget, max_size
        self.keep_effective, self.lr_scaling, self.watts, self.verbose = keep_effective, lr_scaling, watts, verbose
        self.result: BatchSizeResult | None = None
        self._set: dict[str, Any] = {}  # what was set: batch size, accumulation, factor of learning rates; saved in checkpoints
        self._undo = contextlib.ExitStack()
        self._training = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has nothing to restore: the changes belong to the original."""
        return vars(self) | {"_undo": contextlib.ExitStack(), "_training": False}

    # -- Lightning's hooks -------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or disabled() or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._undo.close()  # the previous fit may have ended without `teardown`
        self.result, self._set = None, {}
        self._refuse(trainer, pl_module)
        strategy: Any = trainer.strategy
        setup_optimizers, process_dataloader = strategy.setup_optimizers, strategy.process_dataloader
        setup_data = trainer.fit_loop.setup_data
        self._replace(strategy, "setup_optimizers", lambda trainer: self._setup_optimizers(trainer, setup_optimizers))
        self._replace(strategy, "process_dataloader", lambda loader: self._process_dataloader(process_dataloader(loader)))
        self._replace(trainer.fit_loop, "setup_data", lambda: self._setup_data(setup_data))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.result is not None and self.verbose:
            rank_zero_say(self.summary())
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._undo.close()  # Lightning does not call `teardown` if `setup` failed

    def state_dict(self) -> dict[str, Any]:
        return dict(self._set)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run keeps its batch size: nothing is searched again."""
        self._set = dict(state_dict)

    def summary(self) -> str:
        """One line: batch size and accumulation before and after, predicted and confirmed peak."""
        result = self.result
        if result is None:
            return "MemOpt: the batch size was not searched."
        effective = result.size * self._set["accumulate"]
        each = f", {effective} samples an update on each rank, {effective * result.ranks} on all" if result.ranks > 1 else ""
        return (
            f"{result}; accumulate_grad_batches {self._set['accumulate_before']} -> {self._set['accumulate']}{each}, "
            f"learning rates x{self._set['lr_factor']:g}"
        )

    # -- before training ---------------------------------------------------------------------------

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise UnsupportedError or ConfigError if the batch size cannot be searched for with this Trainer."""
        if trainer.world_size > 1 and not isinstance(trainer.strategy, part(trainer, "strategies").DDPStrategy):
            raise UnsupportedError(
                f"MemOptBatchScaler searches on one device, or on several with DDP; {type(trainer.strategy).__name__} trains "
                f"on {trainer.world_size}. Use MemOptDDPStrategy, or set the batch size and leave MemOptBatchScaler out."
            )
        if not module.automatic_optimization:
            raise UnsupportedError(
                "MemOptBatchScaler does not know what a step is in manual optimization. Use find_max_batch_size with your own "
                "step."
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise UnsupportedError(
                "training_step takes dataloader_iter, so it makes its own batches. Take a batch, or leave MemOptBatchScaler "
                "out."
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        scheduler = part(trainer, "callbacks").GradientAccumulationScheduler
        if any(isinstance(c, scheduler) and c.going_to_accumulate_grad_batches() for c in callbacks):
            raise UnsupportedError(
                "GradientAccumulationScheduler sets accumulate_grad_batches by epoch, and so does MemOptBatchScaler: use one "
                "of them."
            )
        if isinstance(trainer.strategy, MemOptMixin) == (self.budget is not None):
            raise ConfigError(
                f"The budget is {self.budget!r} and the strategy is {type(trainer.strategy).__name__}: give the budget to "
                "MemOptStrategy, or, with another strategy, to MemOptBatchScaler."
            )
        plan_path = trainer.strategy.memopt_config.plan if isinstance(trainer.strategy, MemOptMixin) else None
        if plan_path is not None:
            raise ConfigError(
                f"The plan {plan_path} was made for one batch size, and MemOptBatchScaler chooses another. Leave plan= out, or "
                "leave MemOptBatchScaler out."
            )

    def _setup_optimizers(self, trainer: Trainer, setup_optimizers: Callable[[Trainer], None]) -> None:
        """Search, unless a checkpoint gave the size; then create the optimizers. `setup_optimizers`: Lightning's method."""
        if not self._set:
            self._search(trainer, setup_optimizers)
            lightning_private.forget_loaders(trainer)
        self._undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = self._set["accumulate"]
        setup_optimizers(trainer)
        factor = self._set["lr_factor"]
        if factor != 1.0:
            schedulers = [c.scheduler for c in trainer.strategy.lr_scheduler_configs]
            scale(trainer.strategy.optimizers, schedulers, factor)
            rank_zero_say(f"MemOpt: learning rates and their schedules are scaled by {factor:g} ({self.lr_scaling})")

    def _search(self, trainer: Trainer, setup_optimizers: Callable[[Trainer], None]) -> None:
        """Search with temporary optimizers, and decide what to set."""
        module, strategy = trainer.lightning_module, trainer.strategy
        data = () if trainer.datamodule is None else (vars(trainer.datamodule),)  # type: ignore[attr-defined]
        accumulate = trainer.accumulate_grad_batches
        with untouched(module, *data, vars(strategy.precision_plugin)), probe.quiet(trainer):
            setup_optimizers(trainer)
            lightning_private.forget_loaders(trainer)
            loader = probe.training_loader(trainer)
            source = FromLoader(loader)
            config, budget = self._budget(strategy)
            effective = source.size * accumulate
            zero_when_whole = self.keep_effective or accumulate == 1  # else gradients of earlier batches stay
            gradient_nbytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            self.result = Search(
                step=lambda batch, session, whole: probe.step(trainer, batch, session, whole and zero_when_whole),
                source=source,
                model=strategy.model or module,
                optimizers=strategy.optimizers,
                device=strategy.root_device,
                keep=(loader, loader.dataset, [c.scheduler for c in strategy.lr_scheduler_configs]),
                config=config,
                budget_nbytes=budget,
                mode=self.mode,
                effective=effective if self.keep_effective else None,
                spare_nbytes=gradient_nbytes,
                max_size=self.max_size,
                watts=self.watts,
            ).find()
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        size = self.result.size
        ratio = 1.0 if self.keep_effective else size / source.size
        self._set = {
            "size": size,
            "accumulate": effective // size if self.keep_effective else accumulate,
            "accumulate_before": accumulate,
            "lr_factor": FACTORS[self.lr_scaling](ratio),
        }
        if self.verbose:
            self._say_result(trainer, source)

    def _budget(self, strategy: Any) -> tuple[MemOptConfig | None, int]:
        """(options of the run, or None if it has no plans; bytes that a step may use)."""
        planned = isinstance(strategy, MemOptMixin)
        config = strategy.memopt_config if planned else MemOptConfig(budget=self.budget)  # type: ignore[arg-type]
        return (config if planned else None), bytes_on(strategy.root_device, config)

    def _say_result(self, trainer: Trainer, source: FromLoader) -> None:
        """Say the summary, and warn of everything that depends on the batch size."""
        rank_zero_say(self.summary())
        size = self._set["size"]
        if size == source.size:
            if self.keep_effective and self._set["accumulate"] == 1:
                rank_zero_say(
                    f"MemOpt: one batch of {size} is one update, which keep_effective=True keeps. Larger batches need "
                    "accumulate_grad_batches above 1, or keep_effective=False."
                )
            return
        if any(isinstance(m, _BatchNorm) for m in trainer.lightning_module.modules()):
            rank_zero_warn(f"MemOpt: BatchNorm now sees batches of {size} samples instead of {source.size}: results differ.")
        counted = [n for n in ("limit_train_batches", "val_check_interval") if isinstance(getattr(trainer, n), int)]
        if counted:
            rank_zero_warn(f"MemOpt: {' and '.join(counted)} count batches, which now have {size} samples, not {source.size}.")
        if source.loader.drop_last:
            rank_zero_warn(f"MemOpt: drop_last=True now drops up to {size - 1} samples an epoch, {source.size - 1} before.")

    # -- the loader --------------------------------------------------------------------------------

    def _setup_data(self, setup_data: Callable[[], None]) -> None:
        """Remember that the loaders that are now processed are for training. `setup_data`: Lightning's method."""
        self._training = True
        try:
            setup_data()
        finally:
            self._training = False

    def _process_dataloader(self, loader: Any) -> Any:
        """Set the batch size on the training loader; loaders of other stages are not changed."""
        if self._training and self._set:
            refuse_loader(loader)
            sampler = loader.batch_sampler
            if sampler.batch_size != self._set["size"]:
                self._undo.callback(setattr, sampler, "batch_size", sampler.batch_size)
                sampler.batch_size = self._set["size"]
        return loader

    def _replace(self, holder: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace a method of one object until `_undo` is closed."""
        setattr(holder, name, _Replacement(holder, name, call))
        self._undo.callback(vars(holder).pop, name, None)
