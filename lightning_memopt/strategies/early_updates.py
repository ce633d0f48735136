"""Reasons why the parameters of a Trainer must not be updated in backward (early updates).

Early updates are refused if anything reads gradients after backward, or needs the gradients of several parameters at once.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_memopt.integrations.lightnings import part
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.strategies import lightning_private

_READERS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
"""Hooks of modules and callbacks whose purpose is to read gradients."""
_PRECISIONS = ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")
"""The only precision plugins that are allowed (subclasses are not), and only without a GradScaler."""


def of_trainer(trainer: Any) -> list[Reason]:
    """The reasons, the most frequent ones first; an empty list if early updates give the same bits."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    strategies, plugins = part(trainer, "strategies"), part(trainer, "plugins")
    is_overridden = part(trainer, "utilities.model_helpers").is_overridden
    # session/ranks/processes.py has the reasons for their models
    known = (strategies.DDPStrategy, lightning_private.ShardedStrategy)
    reasons = []
    if not module.automatic_optimization:
        reasons.append(Reason("optimization is manual", "Set automatic_optimization=True"))
    if trainer.gradient_clip_val:
        why = f"gradient_clip_val={trainer.gradient_clip_val} looks at all gradients before any parameter is updated"
        reasons.append(Reason(why, "Leave gradient_clip_val out"))
    if is_overridden("configure_gradient_clipping", module):
        reasons.append(Reason(f"{_name(module)}.configure_gradient_clipping is overridden", "Do without clipping"))
    if getattr(precision, "scaler", None) is not None:
        why = f"precision={precision.precision!r} has a GradScaler, which first checks all gradients for infinities"
        reasons.append(Reason(why, "Use precision='bf16-mixed'"))
    elif type(precision) not in [getattr(plugins, name) for name in _PRECISIONS]:
        why = f"the precision plugin {_name(precision)} is not known"
        reasons.append(Reason(why, "Use precision='32-true' or 'bf16-mixed'"))
    if lightning_private.detects_anomalies(trainer) or torch.is_anomaly_enabled():
        why = "detect_anomaly=True stops at the first NaN, and the model must then be as it was before the step"
        reasons.append(Reason(why, "Set detect_anomaly=False"))
    if is_overridden("backward", module):
        reasons.append(Reason(f"{_name(module)}.backward is overridden", "Leave backward to Lightning"))
    for owner in (module, *trainer.callbacks):
        for hook in _READERS:
            if is_overridden(hook, owner):
                why = f"{_name(owner)}.{hook} is overridden, and would see no gradients"
                reasons.append(Reason(why, "Read gradients in hooks of tensors (`p.register_hook`)"))
    if isinstance(trainer.strategy, strategies.ParallelStrategy) and not isinstance(trainer.strategy, known):
        reasons.append(Reason(f"{_name(trainer.strategy)} reduces gradients over processes", "Train on one device"))
    return reasons


def _name(owner: Any) -> str:
    return type(owner).__name__
