"""Which weights of a model come to a device, and go, together."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from lightning_memopt.device.places import is_on
from lightning_memopt.runtime.weight_memory import may_be_parked

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LARGEST = 0.5
"""A module in a container with a larger share of all weights is not a unit: its own parts are."""


def weight_units(model: nn.Module, device: torch.device, trained: Container[int] = ()) -> dict[str, dict[str, torch.Tensor]]:
    """Path of a module -> its weights on this device by name: of modules in containers (blocks), and of modules outside of
    them. A weight of two modules belongs to the first. Those that are trained belong to a unit only if most of its bytes are:
    adapters stay, they are small, and updated in every step.

    trained: identities of the parameters that may be parked although they are trained.
    """
    names = {id(p): name for name, p in model.named_parameters()}

    def weights(module: nn.Module, recurse: bool) -> dict[str, torch.Tensor]:
        own = [p for p in module.parameters(recurse) if id(p) in names and is_on(device, p.device) and may_be_parked(p)]
        frozen = [p for p in own if not p.requires_grad]
        both = [p for p in own if not p.requires_grad or id(p) in trained]
        most_are_trained = sum(p.nbytes for p in both) > 2 * sum(p.nbytes for p in frozen)
        return {names[id(p)]: p for p in (both if most_are_trained else frozen)}

    largest = _LARGEST * sum(p.nbytes for p in weights(model, True).values())
    units: dict[str, dict[str, torch.Tensor]] = {}

    def walk(module: nn.Module, path: str, in_container: bool) -> None:
        whole = weights(module, True)
        is_unit = bool(path) and (in_container or not any(True for _ in module.children()))
        if is_unit and sum(p.nbytes for p in whole.values()) <= largest and not isinstance(module, _CONTAINERS):
            units[path] = whole
            return
        if path and (own := weights(module, False)):
            units[path] = own
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name, isinstance(module, _CONTAINERS))

    walk(model, "", False)
    first = {id(p): path for path, own in reversed(units.items()) for p in own.values()}
    distinct = {path: {name: p for name, p in own.items() if first[id(p)] == path} for path, own in units.items()}
    return {path: own for path, own in distinct.items() if own}
