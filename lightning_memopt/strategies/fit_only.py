"""`fit_only=True`: say whether the Trainer's steps fit, and leave `trainer.fit` before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from lightning_memopt.batching import untouched
from lightning_memopt.callbacks import probe
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.asking import STEPS, Answer, asked, refuse_elsewhere
from lightning_memopt.session import Session
from lightning_memopt.strategies import lightning_private

if TYPE_CHECKING:
    from lightning_memopt.graph import Graph


def answered(strategy: Any, trainer: Any) -> Answer | None:
    """The answer for the steps of a fit whose model has not been moved to its device; it is said, too.

    Raises UnsupportedError for a Trainer with several devices, or whose loop makes its own steps.
    """
    module, config = trainer.lightning_module, strategy.memopt_config
    if trainer.world_size > 1 or not module.automatic_optimization:
        what = "on several devices" if trainer.world_size > 1 else "in manual optimization"
        raise UnsupportedError(f"fit_only does not know a step {what}. Run `memopt fit -- python train.py` on one device.")
    refuse_elsewhere(module)

    def observe(config: MemOptConfig) -> tuple[Graph | None, str]:
        strategy.model = strategy.precision_plugin.convert_module(module)
        strategy.setup_optimizers(trainer)
        batches = iter(probe.training_loader(trainer))
        session = Session(strategy.model, strategy.optimizers, config)
        try:
            for _ in range(STEPS):
                for i in range(trainer.accumulate_grad_batches):
                    probe.step(trainer, next(batches), session, i == 0)
                session.step_ended()
            return session.observed_graph, str(session.status().reason or "")
        finally:
            session.close()

    def within(most_nbytes: int) -> Any:
        data = () if trainer.datamodule is None else (vars(trainer.datamodule),)
        return untouched(module, *data, vars(strategy.precision_plugin), most_nbytes=most_nbytes)

    model = strategy.model
    try:
        with probe.quiet(trainer):
            answer = asked(observe, within, type(module).__name__, config, strategy.root_device)
    finally:
        strategy.model = model
        strategy.optimizers = []
        strategy.lr_scheduler_configs = []
        lightning_private.forget_loaders(trainer)
    if answer is not None and config.verbose:
        rank_zero_say(answer.table())
    return answer


def leave(trainer: Any) -> NoReturn:
    """End `trainer.fit` here, as one that has ended well."""
    raise lightning_private.ends_fit(trainer)
