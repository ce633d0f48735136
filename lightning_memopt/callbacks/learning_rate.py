"""Learning rates after a change of the samples an update, and the schedules that were made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

FACTORS: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}
"""How a learning rate follows the ratio of samples an update: linear suits SGD, the root Adam and its kin."""

_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULE = ("base_lrs", "max_lrs", "_last_lr")


def _scaled(value: Any, factor: float) -> Any:
    return value.mul_(factor) if isinstance(value, torch.Tensor) else value * factor


def scale(optimizers: Iterable[torch.optim.Optimizer], schedules: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of all groups, and what schedules compute them from. Floors that a schedule was given as a
    number (`eta_min`, ReduceLROnPlateau's `min_lr`) stay.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _OF_GROUP:
                if name in group and group[name] is not None:
                    group[name] = _scaled(group[name], factor)
    seen: set[int] = set()
    todo = list(schedules)
    while todo:
        schedule = todo.pop()
        inner = getattr(schedule, "_schedulers", ())  # SequentialLR, ChainedScheduler
        todo.extend(inner)
        for name in _OF_SCHEDULE:
            values = getattr(schedule, name, None)
            if isinstance(values, list) and id(values) not in seen:
                seen.add(id(values))
                values[:] = [_scaled(value, factor) for value in values]
