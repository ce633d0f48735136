"""Run training steps of a Trainer without its loop: `MemOptBatchScaler` does this before training starts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.integrations.lightnings import part
from lightning_memopt.session import Session
from lightning_memopt.strategies import lightning_private

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def training_loader(trainer: Trainer) -> Any:
    """The loader that training will use on this rank. Raises UnsupportedError if there are several, or none."""
    source = lightning_private.data_source(trainer)
    if not source.is_defined():
        raise UnsupportedError("There is no training loader. Give one to fit, or define train_dataloader.")
    loaders = source.dataloader()
    combined_loader = part(trainer, "utilities").CombinedLoader
    combined = loaders if isinstance(loaders, combined_loader) else combined_loader(loaders, "max_size_cycle")
    if len(combined.flattened) != 1:
        raise UnsupportedError(
            f"There are {len(combined.flattened)} training loaders, so there is no one batch size. Give one, or leave "
            "MemOptBatchScaler out."
        )
    return lightning_private.of_this_rank(trainer, combined.flattened[0])


@contextlib.contextmanager
def quiet(trainer: Trainer) -> Iterator[None]:
    """Steps inside this block call no callback and no logger. `untouched`, around it, restores the module's attributes."""
    module, state = trainer.lightning_module, trainer.state
    before = trainer.callbacks, trainer.loggers, state.stage  # type: ignore[attr-defined]
    trainer.callbacks = []  # type: ignore[attr-defined]
    trainer.loggers = [part(trainer, "loggers.logger").DummyLogger()] if before[1] else []
    trainer.training = True
    for name in ("log", "log_dict"):
        module.__dict__[name] = _log_nothing
    try:
        yield
    finally:
        trainer.callbacks, trainer.loggers, state.stage = before  # type: ignore[attr-defined]


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces `LightningModule.log` while no loop runs."""


def step(trainer: Trainer, batch: Any, session: Session | None, whole: bool) -> None:
    """Run one step as Lightning's loop for automatic optimization does.

    `whole`: set gradients to zero before backward; False: add to the gradients, as in a step that accumulates.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    batch = strategy.precision_plugin.convert_input(batch)
    batch = lightning_private.before_batch_transfer(module, batch)
    batch = strategy.batch_to_device(batch, dataloader_idx=0)
    names = inspect.signature(module.training_step).parameters
    args = (batch, 0) if "batch_idx" in names or len(names) > 1 else (batch,)
    optimizer = strategy.optimizers[0]
    nothing = contextlib.nullcontext

    def closure() -> torch.Tensor | None:
        with session.round((args, {})) if session is not None else nothing():
            out: Any = strategy.training_step(*args)
        loss = out["loss"] if isinstance(out, Mapping) else out
        if loss is None:
            return None
        if whole:  # after the forward, as in Lightning's loop: the gradients of the last update exist during forward
            module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
        with session.rounds.backward() if session is not None else nothing():
            strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
        if session is not None:
            session.update_begins(optimizer)
        return loss.detach()

    module.optimizer_step(trainer.current_epoch, 0, lightning_private.lightning_optimizers(strategy)[0], closure)
    if session is not None:
        session.update_ended(optimizer)
