"""Bytes that the tests of tiers store, and a gate in front of a disk."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

CPU = torch.device("cpu")


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def back(parked: Any) -> torch.Tensor:
    out = torch.full((parked.nbytes,), 7, dtype=torch.uint8)
    parked.fetch(out)
    parked.wait_fetched()
    return out


class Gate:
    """Writes (or reads) that wait until they are let through."""

    def __init__(self, monkeypatch: Any, name: str) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        real = getattr(os, name)

        def gated(*args: Any) -> int:
            self.reached.set()
            assert self.open.wait(20)
            return real(*args)

        monkeypatch.setattr(os, name, gated)
