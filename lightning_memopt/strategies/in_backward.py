"""What about a Trainer forbids updates in backward: what looks at gradients after backward, or does more than one of them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memopt.runtime.early_updates import Reason

_READERS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
"""Hooks of modules and callbacks that are there to look at gradients."""
_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
"""Exactly these, and without a GradScaler."""


def of_trainer(trainer: Any) -> list[Reason]:
    """The reasons, the ones that are most often met first; none where updates in backward may be exact."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    found = []
    if not module.automatic_optimization:
        found.append(Reason("optimization is manual", "Set automatic_optimization=True"))
    if trainer.gradient_clip_val:
        what = f"gradient_clip_val={trainer.gradient_clip_val} looks at all gradients before any parameter is updated"
        found.append(Reason(what, "Leave gradient_clip_val out"))
    if is_overridden("configure_gradient_clipping", module):
        found.append(Reason(f"{_name(module)}.configure_gradient_clipping is overridden", "Do without clipping"))
    if getattr(precision, "scaler", None) is not None:
        what = f"precision={precision.precision!r} has a GradScaler, which looks for infinities in all gradients first"
        found.append(Reason(what, "Use precision='bf16-mixed'"))
    elif type(precision) not in _PRECISIONS:
        found.append(Reason(f"the precision plugin {_name(precision)} is not known", "Use precision='32-true' or 'bf16-mixed'"))
    if trainer._detect_anomaly or torch.is_anomaly_enabled():
        what = "detect_anomaly=True stops at the first NaN, which must find the model as it was before the step"
        found.append(Reason(what, "Set detect_anomaly=False"))
    if is_overridden("backward", module):
        found.append(Reason(f"{_name(module)}.backward is overridden", "Leave backward to Lightning"))
    for owner in (module, *trainer.callbacks):
        for hook in _READERS:
            if is_overridden(hook, owner):
                what = f"{_name(owner)}.{hook} is overridden, and would see no gradients"
                found.append(Reason(what, "Read gradients in hooks of tensors (`p.register_hook`)"))
    if trainer.world_size > 1 or isinstance(trainer.strategy, ParallelStrategy):
        found.append(Reason(f"{_name(trainer.strategy)} reduces gradients over processes", "Train on one device"))
    return found


def _name(owner: Any) -> str:
    return type(owner).__name__
