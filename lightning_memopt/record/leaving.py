"""Storages whose memory leaves the device in the middle of a step, and that live on: who observes the step is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_told: list[Callable[[torch.Tensor], None]] = []


@contextlib.contextmanager
def told_of_leaving(told: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within, `told` is called with a tensor on each storage that leaves."""
    _told.append(told)
    try:
        yield
    finally:
        _told.remove(told)


def leaves(t: torch.Tensor) -> None:
    """The memory of the storage of `t` leaves the device."""
    for told in _told:
        told(t)
