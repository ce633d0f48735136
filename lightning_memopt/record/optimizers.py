"""What an optimizer updates, and the classes whose step is known to update each parameter by itself."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Container
from typing import Any

import torch

from lightning_memopt.errors import ConfigError
from lightning_memopt.torch_private import WARNED_CAPTURABLE

_registered: dict[type, Any] = {}
"""Class -> its step without wrappers, as it was registered."""


def register_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Say of an optimizer of your own that its step updates each parameter by itself, as torch's do. Then its state and
    gradients may be parked, and its parameters updated in backward; otherwise all of that is done for torch's classes alone.

    By registering it you say that `step`
    - goes through `self.param_groups` in one `for` loop of its own, and updates the parameters of a group in any order;
    - reads, for a parameter, its weight, its gradient, `self.state[p]`, and options of its group, and no other parameter;
    - writes to the weight and to `self.state[p]`, and to nothing else: no counter in the group or in the optimizer;
    - leaves a parameter without a gradient as it is, its state too: one that was updated in backward has none any more;
    - draws no random numbers, because parameters are updated in another order in backward;
    - keeps no temporary tensor from one parameter to the next (let a function update one parameter).

    A rehearsal on tensors without memory finds most steps that do otherwise, and raises UnsupportedError. That a step reads no
    other parameter is not checked. `kind`: exactly this class is meant; its subclasses may do more.

    Raises ConfigError for what is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"register_optimizer({kind!r}): give a class that derives from torch.optim.Optimizer.")
    _registered[kind] = inspect.unwrap(kind.step)


def is_registered(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class of this optimizer is registered, with the step that it has now."""
    kind = type(optimizer)
    return kind in _registered and inspect.unwrap(kind.step) is _registered[kind]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def updates_any(optimizer: torch.optim.Optimizer, parameters: Container[int]) -> bool:
    """Whether the optimizer has one of these parameters, which are given by `id`."""
    return any(id(p) in parameters for p in parameters_of(optimizer))


def double_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """A throw-away optimizer of the same class with this group, and no state. Hooks of the user's do not see its steps. It has
    the attributes that a step may read: of torch's own only one; of a registered one all but hooks, and the wrapper that a
    scheduler puts around its step.
    """
    registered = is_registered(optimizer)
    double = type(optimizer).__new__(type(optimizer))
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name == WARNED_CAPTURABLE or (registered and not name.startswith("_optimizer_") and name != "step")
    }
    own = {"defaults": dict(optimizer.defaults), "param_groups": [group], "state": defaultdict(dict)}
    double.__setstate__(attributes | own)
    return double
