"""`MemOptBatchScaler`: the batch size that the budget allows, chosen before training starts and before schedules are built.

The probe runs where Lightning makes the optimizers (`Strategy.setup_optimizers`): with optimizers that are thrown away, on real
batches, without callbacks, loggers or loops, inside `untouched`. Then the optimizers are made for good, when the number of
steps is known. The size is set on the loader's batch sampler where Lightning hands loaders to the strategy
(`Strategy.process_dataloader`, before lengths are taken), and put back at the end.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memopt.batching import MODES, BatchSizeResult, FromLoader, Mode, Search, refuse_loader, untouched
from lightning_memopt.callbacks import probe
from lightning_memopt.callbacks.learning_rate import FACTORS, scale
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.session.budget import bytes_on
from lightning_memopt.strategies import MemOptMixin

LrScaling = Literal["none", "linear", "sqrt"]


class _Instead:
    """In the place of the method `name` of `holder`. A copy of the holder has its own method back."""

    def __init__(self, holder: Any, name: str, call: Callable[..., Any]) -> None:
        self._holder, self._name, self._call = holder, name, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._holder, self._name)  # asked of the copy before it has attributes of its own


class MemOptBatchScaler(Callback):
    """Choose the training batch size before training starts; with few real steps, which leave nothing behind.

    Args:
        mode: `"largest"` that fits, `"throughput"`: the most samples a second, `"energy"`: the fewest joules a sample.
        budget: bytes of the device that a step may use, where the strategy is not `MemOptStrategy`, which has its own.
        max_size: no size is larger.
        keep_effective: keep the samples between two updates as they are, by changing `accumulate_grad_batches`: only sizes
            that divide them are chosen. False: every batch may grow, and updates with it.
        lr_scaling: of learning rates where `keep_effective=False`: by nothing, the ratio of samples an update, or its root.
        watts: what the device draws while it trains, for `"energy"`; by default it is measured, on NVIDIA GPUs.
        verbose: say what was chosen, and at the end what came of it.
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
        self.found: BatchSizeResult | None = None
        self._set: dict[str, Any] = {}
        self._undo = contextlib.ExitStack()
        self._training = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has nothing to put back: what it was attached to is the original's."""
        return vars(self) | {"_undo": contextlib.ExitStack(), "_training": False}

    # -- Lightning's hooks -------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or disabled() or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._undo.close()  # of a fit that was not torn down
        self.found, self._set = None, {}
        self._refuse(trainer, pl_module)
        strategy: Any = trainer.strategy
        make, process, load = strategy.setup_optimizers, strategy.process_dataloader, trainer.fit_loop.setup_data
        self._patch(strategy, "setup_optimizers", lambda trainer: self._setup_optimizers(trainer, make))
        self._patch(strategy, "process_dataloader", lambda loader: self._process(process(loader)))
        self._patch(trainer.fit_loop, "setup_data", lambda: self._load(load))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.found is not None and self.verbose:
            rank_zero_info(self.summary())
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._undo.close()  # teardown is not called where setup failed

    def state_dict(self) -> dict[str, Any]:
        return dict(self._set)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A run that goes on keeps its batch size: nothing is searched again."""
        self._set = dict(state_dict)

    def summary(self) -> str:
        """One line: batch size before and after, predicted and confirmed peak, and what accumulation became."""
        if self.found is None:
            return "MemOpt: the batch size was not searched."
        return (
            f"{self.found}; accumulate_grad_batches {self._set['accumulate_before']} -> {self._set['accumulate']}, "
            f"learning rates x{self._set['lr_factor']:g}"
        )

    # -- before training ---------------------------------------------------------------------------

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.world_size > 1:
            raise UnsupportedError(
                f"MemOptBatchScaler searches on one device; this Trainer has {trainer.world_size}. Use devices=1, or set the "
                "batch size and leave MemOptBatchScaler out."
            )
        if not module.automatic_optimization:
            raise UnsupportedError(
                "MemOptBatchScaler cannot tell what a step is in manual optimization. Use find_max_batch_size with a step of "
                "your own."
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise UnsupportedError(
                "training_step takes dataloader_iter, so it makes its own batches. Take a batch, or leave MemOptBatchScaler "
                "out."
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, GradientAccumulationScheduler) and c.going_to_accumulate_grad_batches() for c in callbacks):
            raise UnsupportedError(
                "GradientAccumulationScheduler sets accumulate_grad_batches by epoch, and so does MemOptBatchScaler: use one "
                "of them."
            )
        if isinstance(trainer.strategy, MemOptMixin) == (self.budget is not None):
            raise ConfigError(
                f"The budget is {self.budget!r} and the strategy is {type(trainer.strategy).__name__}: give the budget to "
                "MemOptStrategy, or, with another strategy, to MemOptBatchScaler."
            )
        given = trainer.strategy.memopt_config.plan if isinstance(trainer.strategy, MemOptMixin) else None
        if given is not None:
            raise ConfigError(
                f"The plan {given} was made for one batch size, and MemOptBatchScaler chooses another. Leave plan= out, or "
                "leave MemOptBatchScaler out."
            )

    def _setup_optimizers(self, trainer: Trainer, make: Callable[[Trainer], None]) -> None:
        loop: Any = trainer.fit_loop
        if not self._set:
            self._search(trainer, make)
            loop._combined_loader = None  # as Lightning's own finder has it: loaders are made anew, lengths taken anew
        self._undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = self._set["accumulate"]
        make(trainer)
        factor = self._set["lr_factor"]
        if factor != 1.0:
            schedulers = [c.scheduler for c in trainer.strategy.lr_scheduler_configs]
            scale(trainer.strategy.optimizers, schedulers, factor)
            rank_zero_info(f"MemOpt: learning rates and their schedules are scaled by {factor:g} ({self.lr_scaling})")

    def _search(self, trainer: Trainer, make: Callable[[Trainer], None]) -> None:
        module, strategy = trainer.lightning_module, trainer.strategy
        data = () if trainer.datamodule is None else (vars(trainer.datamodule),)  # type: ignore[attr-defined]
        accumulate = trainer.accumulate_grad_batches
        with untouched(module, *data, vars(strategy.precision_plugin)), probe.quiet(trainer):
            make(trainer)
            trainer.fit_loop._combined_loader = None
            loader = probe.training_loader(trainer)
            source = FromLoader(loader)
            config, budget = self._budget(strategy)
            effective = source.size * accumulate
            alone = self.keep_effective or accumulate == 1
            gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            self.found = Search(
                step=lambda batch, session, whole: probe.step(trainer, batch, session, whole and alone),
                source=source,
                model=strategy.model or module,
                optimizers=strategy.optimizers,
                device=strategy.root_device,
                keep=(loader, loader.dataset, [c.scheduler for c in strategy.lr_scheduler_configs]),
                config=config,
                budget_nbytes=budget,
                mode=self.mode,
                effective=effective if self.keep_effective else None,
                spare_nbytes=gradients,
                max_size=self.max_size,
                watts=self.watts,
            ).find()
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        size = self.found.size
        ratio = 1.0 if self.keep_effective else size / source.size
        self._set = {
            "size": size,
            "accumulate": effective // size if self.keep_effective else accumulate,
            "accumulate_before": accumulate,
            "lr_factor": FACTORS[self.lr_scaling](ratio),
        }
        if self.verbose:
            self._say(trainer, source)

    def _budget(self, strategy: Any) -> tuple[MemOptConfig | None, int]:
        planned = isinstance(strategy, MemOptMixin)
        config = strategy.memopt_config if planned else MemOptConfig(budget=self.budget)  # type: ignore[arg-type]
        return (config if planned else None), bytes_on(strategy.root_device, config)

    def _say(self, trainer: Trainer, source: FromLoader) -> None:
        rank_zero_info(self.summary())
        size = self._set["size"]
        if size == source.size:
            if self.keep_effective and self._set["accumulate"] == 1:
                rank_zero_info(
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

    def _load(self, load: Callable[[], None]) -> None:
        self._training = True
        try:
            load()
        finally:
            self._training = False

    def _process(self, loader: Any) -> Any:
        """The size is set on what is about to be the training loader; loaders of other stages pass."""
        if self._training and self._set:
            refuse_loader(loader)
            sampler = loader.batch_sampler
            if sampler.batch_size != self._set["size"]:
                self._undo.callback(setattr, sampler, "batch_size", sampler.batch_size)
                sampler.batch_size = self._set["size"]
        return loader

    def _patch(self, holder: Any, name: str, with_this: Callable[..., Any]) -> None:
        setattr(holder, name, _Instead(holder, name, with_this))
        self._undo.callback(vars(holder).pop, name, None)
