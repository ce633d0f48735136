"""The host tier: on CPU tensors, and under streams that run what is queued in any order that the tier's waits allow (P13)."""

from __future__ import annotations

import gc
import mmap
import types
import warnings
import weakref
from typing import Any

import pytest
import torch

from lightning_memopt.errors import OffloadError, UnsupportedError
from lightning_memopt.runtime.tiers import HostTier
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.staging import Staging
from lightning_memopt.runtime.tiers.streams import HostPool
from tests.cpu.lib.fake_streams import Streams
from tests.cpu.lib.tier_bytes import CPU, random_bytes


def race(monkeypatch: Any, seed: int, broken: str = "") -> tuple[int, int]:
    """Store, use again, fetch and release in every mix, on memory that is used again at once: (checks, checks that failed)."""
    streams = Streams(seed, broken)
    monkeypatch.setattr(streams_module, "copy", streams.copy)
    draw = streams.draw
    tier = HostTier(6 * 512, CPU, streams=streams)
    memory = [torch.zeros(512, dtype=torch.uint8) for _ in range(4)]
    parked: list[tuple[Any, torch.Tensor]] = []
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    checks: list[bool] = []

    def expect(t: torch.Tensor, value: torch.Tensor) -> None:
        streams.queue(lambda: checks.append(torch.equal(t, value)))

    for i in range(150):
        place, value = draw.choice(memory), random_bytes(512, 1000 * seed + i)
        if len(parked) < 5 and draw.random() < 0.5:
            how = draw.choice(["wait", "wait", "ask", "hold"])
            place = torch.zeros(512, dtype=torch.uint8) if how == "hold" else place
            streams.queue(lambda place=place, value=value: place.copy_(value))
            one = tier.store(place, f"tensor {i}")
            streams.some()
            if how == "wait":
                one.wait_stored()
            while how == "ask" and not one.stored():
                streams.step()
            if how != "hold":
                streams.queue(lambda place=place: place.fill_(0))  # another tensor's now
            parked.append((one, value))
        elif parked:
            one, value = draw.choice(parked)
            if draw.random() < 0.3:  # nobody waits for what comes back, and its place in the tier is given away
                late.append((torch.zeros(512, dtype=torch.uint8), value))
                one.fetch(late[-1][0])
                one.release()
                parked[:] = [p for p in parked if p[0] is not one]
                continue
            mark = random_bytes(512, i)
            streams.queue(lambda place=place, mark=mark: place.copy_(mark))
            expect(place, mark)  # whoever had this memory before reads it once more
            one.fetch(place)
            streams.some()
            one.wait_fetched()
            expect(place, value)
            if draw.random() < 0.6:
                parked[:] = [p for p in parked if p[0] is not one]
                one.release()
        streams.some()
    streams.drain()
    checks += [torch.equal(out, value) for out, value in late]
    for one, _ in parked:
        one.release()
    assert tier.used_nbytes == 0 and (streams.lost > 0) is bool(broken)
    tier.close()
    return len(checks), checks.count(False)


def test_no_order_that_the_waits_allow_changes_a_bit(monkeypatch: Any) -> None:
    for seed in range(20):
        checks, failed = race(monkeypatch, seed)
        assert checks > 50 and failed == 0


@pytest.mark.parametrize("broken", ["__init__", "fetch done", "fetch free", "wait_stored", "wait_fetched", "_reclaim"])
def test_each_wait_is_needed(monkeypatch: Any, broken: str) -> None:
    """The test above can fail: without the waits of one place, it does."""
    assert sum(race(monkeypatch, seed, broken)[1] for seed in range(20)) > 0


def staged(seed: int, nbytes: int, broken: str = "") -> bool:
    """Whether bytes that pass through two small pieces of host memory arrive, both ways."""
    streams = Streams(seed, broken)
    value, source, out = (
        random_bytes(nbytes, seed),
        torch.zeros(nbytes, dtype=torch.uint8),
        torch.zeros(nbytes, dtype=torch.uint8),
    )
    disk = bytearray(nbytes)
    staging = [Staging(CPU, 64, streams), Staging(CPU, 64, streams)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams_module, "copy", streams.copy)
        streams.queue(lambda: source.copy_(value))
        ready = streams_module.marked(streams, streams.current_stream())
        staging[0].out(source, ready, lambda data, at: disk.__setitem__(slice(at, at + len(data)), bytes(data)))
        streams.queue(lambda: out.fill_(1))
        ready = streams_module.marked(streams, streams.current_stream())
        staging[1].back(out, ready, lambda into, at: into.__setitem__(slice(None), disk[at : at + len(into)]))
        ended = torch.equal(out, value)  # at once: both end when all is done
    return ended and bytes(disk) == bytes(value.tolist())


def test_what_passes_through_staging_arrives() -> None:
    for seed in range(20):
        for nbytes in (1, 64, 65, 128, 500):
            assert staged(seed, nbytes)


@pytest.mark.parametrize("broken", ["out", "_write", "back"])
def test_each_wait_of_staging_is_needed(broken: str) -> None:
    assert not all(staged(seed, 500, broken) for seed in range(20))


def test_memory_is_held_until_its_copy_has_ended_and_no_longer(monkeypatch: Any) -> None:
    """T2: by whom does not matter, and also where the tier's bytes are released before that."""
    streams = Streams(0)
    monkeypatch.setattr(streams_module, "copy", streams.copy)
    tier = HostTier(4096, CPU, streams=streams)
    polled, waited, released, fetched = (tier.store(random_bytes(512), f"tensor {i}") for i in range(4))
    sources = [weakref.ref(one.source) for one in (polled, waited, released, fetched)]
    released.release()
    assert tier.used_nbytes == 3 * 512
    assert all(source() is not None for source in sources) and not polled.stored()
    waited.wait_stored()
    assert sources[1]() is None, "what comes next on this stream comes after the copy"
    streams.drain()
    assert polled.stored() and fetched.stored() and sources[0]() is None and sources[2]() is None
    outs = [torch.empty(512, dtype=torch.uint8) for _ in range(3)]
    held = [weakref.ref(out) for out in outs]
    for out in outs[:2]:
        fetched.fetch(out)
    fetched.wait_fetched()
    polled.fetch(outs[2])
    polled.release()
    del outs, out
    assert tier.used_nbytes == 1024
    assert [out() is not None for out in held] == [False, False, True]
    streams.drain()
    waited.stored()
    assert held[2]() is None, "any question lets go of what has ended"
    tier.close()


def test_errors_of_the_device_name_the_tensor(monkeypatch: Any) -> None:
    tier = HostTier(4096, CPU)
    good = tier.store(random_bytes(100), "good")

    def fails(to: Any, of: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(streams_module, "copy", fails)
    with pytest.raises(OffloadError, match=r"block\.3: copying 100 bytes to the host tier failed \(1\.00 KiB of 4\.00 KiB in"):
        tier.store(random_bytes(100), "block.3")
    with pytest.raises(OffloadError, match="good: copying 100 bytes from the host tier failed.*unspecified launch failure"):
        good.fetch(torch.empty(100, dtype=torch.uint8))
    gc.collect()
    assert tier.used_nbytes == 512, "the place of what was not stored is free again"
    tier.close()


PAGE = mmap.PAGESIZE


class Driver:
    """Page locking of a CUDA driver: how many bytes are locked, by address."""

    def __init__(self, monkeypatch: Any, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.code = self.last_error = code
        runtime = types.SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(streams_module, "_launch", lambda device: self.kernel())

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Whole pages are locked, each once."""
        first, end = address // PAGE, -(-(address + nbytes) // PAGE)
        taken = {page for a, n in self.locked.items() for page in range(a // PAGE, -(-(a + n) // PAGE))}
        code = self.code or (712 if taken & set(range(first, end)) else 0)
        if code == 0:
            self.locked[address] = nbytes
        self.last_error = code or self.last_error
        return code

    def unregister(self, address: int) -> int:
        code = 0 if self.locked.pop(address, None) is not None else 713
        self.last_error = code or self.last_error
        return code

    def kernel(self) -> None:
        """Torch asks for the last error behind each kernel."""
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {error}")


def test_what_was_asked_for_is_locked_in_whole_pages_and_given_back(monkeypatch: Any) -> None:
    """I9: torch's own page-locked memory is rounded up to a power of two."""
    driver = Driver(monkeypatch)
    pool = HostPool(100_000, torch.device("cuda"))
    assert pool.bytes.numel() == 100_000 and pool.bytes.data_ptr() % PAGE == 0
    assert pool.bytes.untyped_storage().data_ptr() == pool.bytes.data_ptr(), "torch asks whether the storage is pinned"
    assert driver.locked == {pool.bytes.data_ptr(): -(-100_000 // PAGE) * PAGE}
    pool.close()
    pool.close()
    assert driver.locked == {} and pool.bytes.numel() == 0
    pool = HostPool(100_000, torch.device("cuda"))
    del pool
    gc.collect()
    assert driver.locked == {}


def test_where_pages_cannot_be_locked_the_memory_is_pageable(monkeypatch: Any) -> None:
    """I8: one warning, the same numbers."""
    driver = Driver(monkeypatch, code=2)
    with pytest.warns(UserWarning, match="could not be page-locked") as found:
        pool = HostPool(4096, torch.device("cuda"))
    assert len(found) == 1 and pool.bytes.numel() == 4096
    driver.kernel()  # the next op of the user does not fail because of it
    pool.close()
    assert driver.locked == {}


def test_small_pools_share_no_page(monkeypatch: Any) -> None:
    """The two staging areas of a disk tier: the second one could not be locked, or the first one unlocked it."""
    driver = Driver(monkeypatch)
    pools = [HostPool(1000, torch.device("cuda")) for _ in range(20)]
    assert len(driver.locked) == 20
    for i, pool in enumerate(pools):
        pool.bytes.fill_(i)
    assert [int(pool.bytes.sum()) for pool in pools] == [1000 * i for i in range(20)]
    for pool in pools:
        pool.close()
    assert driver.locked == {}


def test_an_unlock_that_fails_is_no_error_of_the_next_op(monkeypatch: Any) -> None:
    driver = Driver(monkeypatch)
    pool = HostPool(1000, torch.device("cuda"))
    driver.locked.clear()
    pool.close()
    driver.kernel()


def test_what_is_left_of_the_hosts_memory(monkeypatch: Any, tmp_path: Any) -> None:
    """As the system says it, at most what the container has left, and half of the memory under WSL."""
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:  80 kB\n")
    (tmp_path / "linux").write_text("Linux version 6.1.0 (gcc)")
    (tmp_path / "wsl").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    monkeypatch.setattr(streams_module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(streams_module, "host_memory_nbytes", lambda: 100 << 10)
    for version, container, left in (
        ("linux", None, 80),
        ("linux", 70, 70),
        ("wsl", None, 50),
        ("wsl", 40, 40),
        ("none", 90, 80),
    ):
        monkeypatch.setattr(streams_module, "_VERSION", tmp_path / version)
        monkeypatch.setattr(streams_module, "cgroup_left_nbytes", lambda n=container: n and n << 10)
        assert streams_module.left_nbytes() == left << 10


def test_more_host_memory_than_there_is_left_is_refused(monkeypatch: Any, tmp_path: Any) -> None:
    """I11: before anything runs, instead of a process that is killed."""
    with pytest.raises(OffloadError, match=r"1\d+ bytes .* of host memory were asked for, and \d+ bytes"):
        HostTier(1 << 50, CPU)
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:  8 kB\n")
    monkeypatch.setattr(streams_module, "_MEMINFO", tmp_path / "meminfo")
    with pytest.raises(OffloadError, match="and 8192 bytes"):
        HostTier(16384, CPU)
    HostTier(8192, CPU).close()


def test_a_device_without_streams_is_refused_by_name(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    with pytest.raises(UnsupportedError, match="mps"):
        HostTier(4096, torch.device("mps"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()
        HostTier(4096, CPU).close()
