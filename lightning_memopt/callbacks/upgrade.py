"""`MemOptCallback`: a memory budget for the strategy that a Trainer already has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memopt.config import MemOptConfig, PlanOptions, config_of
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.integrations.lightnings import Callback, part
from lightning_memopt.session import RunStatus
from lightning_memopt.strategies import MemOptMixin

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from typing_extensions import Unpack

SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy")


class MemOptCallback(Callback):
    """Keep the training steps of a Trainer within a memory budget, with the Trainer's own strategy.

    During the fit, the strategy has a class that derives from its own class and from `MemOptMixin`.

    Args:
        budget: bytes of each device that a step may use, as for `MemOptConfig`.
        config: all options in one object, instead of single ones. Raises ConfigError if both are given.
        options: the other options of `MemOptConfig` (docs/options.md).
    """

    def __init__(
        self, budget: int | float | str | None = None, *, config: MemOptConfig | None = None, **options: Unpack[PlanOptions]
    ) -> None:
        given = dict(options) if budget is None else {"budget": budget, **options}
        self.config = config_of(config, given)
        self._strategy: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle belongs to no Trainer."""
        return vars(self) | {"_strategy": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._restore()
        if isinstance(trainer.strategy, MemOptMixin):
            raise ConfigError(
                f"The Trainer has {type(trainer.strategy).__name__}, which keeps a budget itself. Leave MemOptCallback out, "
                "or use another strategy."
            )
        strategies = part(trainer, "strategies")
        if not isinstance(trainer.strategy, tuple(getattr(strategies, name) for name in SUPPORTED)):
            raise UnsupportedError(
                f"MemOptCallback cannot keep a budget under {type(trainer.strategy).__name__}. Use "
                f"{' and '.join(SUPPORTED)}, or a class that derives from one of them."
            )
        strategy: Any = trainer.strategy
        strategy.memopt_config = self.config
        self._strategy = strategy
        own = type(strategy)
        strategy.__class__ = type(f"MemOpt{own.__name__}", (MemOptMixin, own), {"__module__": own.__module__, "_upgraded": own})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._strategy is not None and self._strategy.session is None:
            self._restore()  # Lightning does not call `teardown` if `setup` failed

    def status(self) -> RunStatus:
        """The status of the current or last fit: its phase, the plan, the predicted and measured peaks."""
        session = None if self._strategy is None else self._strategy.session
        return session.status() if session is not None else RunStatus(phase="waiting")

    def _restore(self) -> None:
        """Give the strategy its own class back. Its last session stays, so that its status can be read."""
        if self._strategy is not None and isinstance(self._strategy, MemOptMixin):
            self._strategy.__class__ = type(self._strategy)._upgraded  # type: ignore[attr-defined]
