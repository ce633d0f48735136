"""`fit_only=True` for transformers' Trainer: say whether its steps fit, and leave `train()` before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

from transformers.trainer_utils import TrainOutput

from lightning_memopt.batching import untouched
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.integrations.asking import STEPS, Answer, asked, refuse_elsewhere
from lightning_memopt.integrations.plain import optimize

if TYPE_CHECKING:
    from lightning_memopt.graph import Graph


class _Answered(Exception):
    """Leaves `Trainer.train`."""


def leave() -> NoReturn:
    """Leave the `train` of a Trainer that is about to train."""
    raise _Answered


def unless_left(trainer: Any, train: Callable[[], Any]) -> Any:
    """What `train` of a Trainer returns; if it was left (`leave`), that of a training of no steps."""
    try:
        return train()
    except _Answered:
        trainer.is_in_train = False
        return TrainOutput(0, 0.0, {})


def answered(trainer: Any, config: MemOptConfig, parts: Mapping[str, Any]) -> Answer | None:
    """The answer for the steps of a Trainer that begins to train. `parts`: what it tells its callbacks.

    Raises UnsupportedError for several processes, and for a model that has been moved to a device.
    """
    args, model = trainer.args, trainer.model_wrapped
    if args.world_size > 1:
        raise UnsupportedError("fit_only knows no step of several processes. Run `memopt fit -- python train.py` in one.")
    refuse_elsewhere(model)
    optimizer, loader = parts["optimizer"], parts["train_dataloader"]

    def observe(config: MemOptConfig) -> tuple[Graph | None, str]:
        batches, rounds = iter(loader), args.gradient_accumulation_steps
        known = mock.patch.object(trainer, "current_gradient_accumulation_steps", rounds, create=True)  # the loop sets it
        with known, optimize(model, optimizer, config=config) as run:
            for _ in range(STEPS):
                for _ in range(rounds):
                    trainer.training_step(model, next(batches))
                if args.max_grad_norm:
                    trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                model.zero_grad()
            return run.session.observed_graph, str(run.status().reason or "")

    def within(most_nbytes: int) -> Any:
        return untouched(model, optimizer, parts["lr_scheduler"], loader, loader.dataset, most_nbytes=most_nbytes)

    return asked(observe, within, type(model).__name__, config, args.device)
