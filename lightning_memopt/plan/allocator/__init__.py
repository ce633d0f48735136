"""A model of PyTorch's caching allocator for CUDA: the bytes of the device that a step reserves.

`model` carries out requests by the allocator's documented rules, on the data of `blocks` and with the options of `settings`;
`reserved` gives it the allocations and frees of a planned step, after those that the real allocator of this process has
served already (`beginning`).
"""

from lightning_memopt.plan.allocator.beginning import Beginning
from lightning_memopt.plan.allocator.model import Allocator, ExhaustedError
from lightning_memopt.plan.allocator.reserved import (
    Described,
    Name,
    Reserved,
    described,
    requests,
    reserved,
)
from lightning_memopt.plan.allocator.settings import Settings

__all__ = [
    "Allocator",
    "Beginning",
    "Described",
    "ExhaustedError",
    "Name",
    "Reserved",
    "Settings",
    "described",
    "requests",
    "reserved",
]
