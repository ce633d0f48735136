"""Tiers on a card: races of `tests/cpu/parking/test_tiers_host.py`, with `torch.cuda._sleep` at the edges; real memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt.errors import OffloadError
from lightning_memopt.runtime.tiers import DiskTier, HostTier
from lightning_memopt.trace.link import measure

CUDA = torch.device("cuda", 0)
LONG = 200_000_000  # cycles: about 0.1 s
MIB = 1 << 20


@pytest.fixture(params=["host", "disk"])
def tier(request: Any, tmp_path: Path) -> Iterator[Any]:
    made = HostTier(64 * MIB, CUDA) if request.param == "host" else DiskTier(64 * MIB, tmp_path, CUDA)
    yield made
    made.close()


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_edge_is_ordered(tier: Any) -> None:
    """The producer is late, the memory is used again at once, the copy back is asked for before the copy out has begun."""
    for seed in range(5):
        value = random_bytes(8 * MIB + seed, seed)
        source = torch.zeros(value.numel(), dtype=torch.uint8, device=CUDA)
        fresh = value.to(CUDA)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        source.copy_(fresh)  # T1
        one = tier.store(source, f"tensor {seed}")
        out = torch.full((value.numel(),), 3, dtype=torch.uint8, device=CUDA)
        before = out.clone()
        torch.cuda._sleep(LONG)
        last_read = out.clone()  # T3: what had this memory before reads it late
        one.fetch(out)
        one.wait_stored()
        source.fill_(0)  # T2, T4
        one.wait_fetched()
        found = out.clone()
        one.release()
        other = tier.store(torch.full_like(out, 5), "in its place")  # T5
        assert torch.equal(last_read, before) and torch.equal(found.cpu(), value)
        other.release()
    assert tier.used_nbytes == 0 or isinstance(tier, DiskTier)


def test_memory_is_the_devices_again(tier: Any) -> None:
    """What is freed after `wait_stored` is used by the next tensor on the stream."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    parked = []
    for i in range(12):
        t = torch.full((4 * MIB,), i, dtype=torch.uint8, device=CUDA)
        one = tier.store(t, f"tensor {i}")
        one.wait_stored()
        del t
        parked.append(one)
    assert torch.cuda.memory_allocated() == base
    assert torch.cuda.max_memory_allocated() <= base + 8 * MIB
    for i, one in enumerate(parked):
        out = torch.empty(4 * MIB, dtype=torch.uint8, device=CUDA)
        one.fetch(out)
        one.wait_fetched()
        assert bool((out == i).all())
        one.release()


def test_the_host_goes_on_while_bytes_move() -> None:
    """And the pages are locked: a copy is one without the host."""
    tier = HostTier(64 * MIB, CUDA)
    assert tier._pool.bytes.is_pinned() and tier._pool.bytes.untyped_storage().nbytes() == 64 * MIB
    t = torch.ones(32 * MIB, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    one = tier.store(t, "behind a long kernel")
    assert not one.stored(), "the copy waits for the kernel, the host for nothing"
    one.wait_stored()
    one.fetch(t)
    one.wait_fetched()
    torch.cuda.synchronize()
    assert one.stored() and bool((t == 1).all())
    with pytest.raises(OffloadError, match="no room"):
        tier.store(torch.empty(40 * MIB, dtype=torch.uint8, device=CUDA), "too large")
    tier.close()


def test_random_copies_on_several_streams(tier: Any) -> None:
    draw = random.Random(0)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    parked: list[tuple[Any, torch.Tensor]] = []
    for i in range(300):
        with torch.cuda.stream(draw.choice(streams)):
            if draw.random() < 0.5 or not parked:
                value = random_bytes(draw.randrange(1, 2 * MIB), i)
                source = value.to(CUDA)
                try:
                    one = tier.store(source, f"tensor {i}")
                except OffloadError:
                    continue
                one.wait_stored()
                source.fill_(0)
                parked.append((one, value))
            else:
                one, value = parked.pop(draw.randrange(len(parked)))
                out = torch.empty(one.nbytes, dtype=torch.uint8, device=CUDA)
                one.fetch(out)
                one.wait_fetched()
                assert torch.equal(out.cpu(), value)
                one.release()


def test_rates_of_this_machine(tmp_path: Path) -> None:
    tiers = [HostTier(64 * MIB, CUDA), DiskTier(64 * MIB, tmp_path, CUDA)]
    rates = measure(tiers, CUDA)
    for tier in tiers:
        tier.close()
    print(rates.links)
    assert 1e9 < rates.links["host"].out_bytes_per_second < 1e12
