"""The disk tier where an interrupt comes at a bad moment."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.runtime.tiers.disk import _DiskParked
from tests.cpu.lib.tier_bytes import random_bytes


def test_an_interrupt_in_the_constructor_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it had made, its destructor has nothing to release, and says nothing."""
    tier = DiskTier(16 * 4096, tmp_path)
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for owner, name in ((torch.Tensor, "numel"), (DiskTier, "piece_of"), (_DiskParked, "_ready")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                _DiskParked(tier, random_bytes(64, seed=5), "a tensor")
        gc.collect()
        assert not said and tier.used_nbytes == 0
    tier.close()
