"""Scale learning rates, and the schedules that were built from them, after a change of the samples an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

FACTORS: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}
"""Name -> factor of the learning rate for a ratio of samples an update. Linear suits SGD, the square root suits Adam."""

_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULE = ("base_lrs", "max_lrs", "_last_lr")


def _scaled(value: Any, factor: float) -> Any:
    return value.mul_(factor) if isinstance(value, torch.Tensor) else value * factor


def scale(optimizers: Iterable[torch.optim.Optimizer], schedules: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of all groups, and the values from which schedules compute them, by `factor`.

    Lower bounds that a schedule was given as a number (`eta_min`, ReduceLROnPlateau's `min_lr`) stay.
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
        todo.extend(getattr(schedule, "_schedulers", ()))  # the parts of a SequentialLR or ChainedScheduler
        for name in _OF_SCHEDULE:
            values = getattr(schedule, name, None)
            if isinstance(values, list) and id(values) not in seen:
                seen.add(id(values))
                values[:] = [_scaled(value, factor) for value in values]
