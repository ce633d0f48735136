"""Tiers where an interrupt comes at a bad moment."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.runtime.tiers import DiskTier, HostTier
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.disk import _DiskParked
from tests.cpu.lib.fake_streams import Streams
from tests.cpu.lib.tier_bytes import CPU, random_bytes


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


def test_an_interrupt_of_a_copy_to_the_host_leaves_a_tier_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(0)
    monkeypatch.setattr(streams_module, "copy", streams.copy)
    tier = HostTier(16 * 512, CPU, streams=streams)
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    source = random_bytes(64, seed=5)
    for owner, name in ((streams, "Event"), (streams_module, "copy")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                tier.store(source, "a tensor")
        gc.collect()
        stored, out = tier.store(source, "a tensor"), torch.empty_like(source)
        stored.fetch(out)
        stored.wait_fetched()
        streams.drain()
        assert torch.equal(out, source) and not said
    tier.close()


def test_an_interrupt_after_a_copy_back_has_begun_frees_no_memory_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(0)
    tier = HostTier(16 * 512, CPU, streams=streams)
    monkeypatch.setattr(streams_module, "copy", streams.copy)
    stored = tier.store(random_bytes(64, seed=5), "a tensor")

    def interrupted(to: torch.Tensor, of: torch.Tensor) -> None:
        streams.copy(to, of)
        raise KeyboardInterrupt

    out = torch.empty(64, dtype=torch.uint8)
    held = weakref.ref(out)
    with monkeypatch.context() as patch:
        patch.setattr(streams_module, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stored.fetch(out)
    stored.release()
    del out
    assert tier.used_nbytes == 0 and held() is not None
    streams.drain()
    assert tier.used_nbytes == 0 and held() is None
    tier.close()
