"""What every tier promises, on CPU tensors: bits, room, errors, threads, ends."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.errors import MemOptError, OffloadError
from lightning_memopt.runtime.tiers import DiskTier, HostTier, Tier
from lightning_memopt.runtime.tiers.staging import Staging
from tests.cpu.lib.tier_bytes import CPU, back, random_bytes


def host(capacity: int) -> Any:
    return HostTier(capacity, CPU)


def disk(capacity: int) -> Any:
    return DiskTier(capacity)


def staged(capacity: int) -> Any:
    """The way of a device's bytes, through pieces that are smaller than most tensors."""
    return DiskTier(capacity, staging=(Staging(CPU, 700), Staging(CPU, 700)))


@pytest.fixture(params=[host, disk, staged])
def make(request: Any) -> Iterator[Callable[[int], Any]]:
    made: list[Tier] = []

    def one(capacity: int) -> Any:
        made.append(request.param(capacity))
        return made[-1]

    yield one
    for tier in made:
        tier.close()


def test_a_thousand_copies_in_any_order_are_bit_equal(make: Any) -> None:
    """Random sizes, several fetches of one, releases before and after copies have ended."""
    draw = random.Random(0)
    tier = make(40 * 4096)
    parked: list[tuple[Any, torch.Tensor]] = []
    fetched = full = 0
    for i in range(1000):
        choice = draw.random()
        if choice < 0.45 or not parked:
            value = random_bytes(draw.choice([0, 1, 511, 512, 4096, 4097, draw.randrange(9000)]), i)
            source = value.clone()
            try:
                one = tier.store(source, f"tensor {i}")
            except OffloadError:
                assert tier.used_nbytes + value.numel() > tier.capacity_nbytes // 4, "refused although three quarters are free"
                full += 1
                continue
            if draw.random() < 0.5:
                one.wait_stored()
                assert one.stored()
                source.fill_(9)  # its memory is someone else's
            parked.append((one, value))
        elif choice < 0.75:
            one, value = draw.choice(parked)
            assert torch.equal(back(one), value)
            fetched += 1
        else:
            one, value = parked.pop(draw.randrange(len(parked)))
            if draw.random() < 0.5:
                one.fetch(torch.empty(one.nbytes, dtype=torch.uint8))
            one.release()
            one.release()
        assert tier.used_nbytes <= tier.capacity_nbytes
    assert fetched > 200 and full > 10
    for one, value in parked:
        assert torch.equal(back(one), value)
        one.release()
    deadline = time.monotonic() + 20
    while tier.used_nbytes and time.monotonic() < deadline:
        time.sleep(0.001)  # copies of what was released end by themselves
    assert tier.used_nbytes == 0


def test_a_full_tier_says_what_is_full_and_by_how_much(make: Any) -> None:
    tier = make(3 * 4096)
    first = tier.store(random_bytes(8192), "blocks.0.mlp")
    source = random_bytes(8192, 1)
    with pytest.raises(OffloadError) as error:
        tier.store(source, "blocks.1.mlp")
    for word in (
        "blocks.1.mlp",
        tier.name,
        "8192 bytes",
        "8.00 KiB of 12.00 KiB in use",
        "4.00 KiB",
        "more bytes, or offload less",
    ):
        assert word in str(error.value)
    assert isinstance(error.value, MemOptError) and torch.equal(source, random_bytes(8192, 1))
    first.wait_stored()
    first.release()
    assert torch.equal(back(tier.store(source, "blocks.1.mlp")), source), "room again, at once"


def test_one_storage_may_come_back_more_than_once(make: Any) -> None:
    """`retain_graph`: two copies under way at once, into two places, and one more later."""
    tier, value = make(8192), random_bytes(5000)
    one = tier.store(value.clone(), "kept graph")
    outs = [torch.zeros(5000, dtype=torch.uint8) for _ in range(2)]
    for out in outs:
        one.fetch(out)
    one.wait_fetched()
    assert all(torch.equal(out, value) for out in outs) and torch.equal(back(one), value)
    one.wait_fetched()


def test_nothing_is_also_stored(make: Any) -> None:
    tier = make(4096)
    one = tier.store(torch.empty(0, dtype=torch.uint8), "empty")
    one.wait_stored()
    assert one.stored() and one.nbytes == 0 and tier.used_nbytes == 0
    one.fetch(torch.empty(0, dtype=torch.uint8))
    one.wait_fetched()
    one.release()
    assert make(0).capacity_nbytes == 0
    with pytest.raises(OffloadError, match="no room"):
        make(0).store(random_bytes(1), "one byte")


def test_only_flat_bytes_of_the_right_size_are_moved(make: Any) -> None:
    tier = make(8192)
    for t in (torch.zeros(8), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="flat uint8"):
            tier.store(t, "not flat")
    one = tier.store(random_bytes(100), "hundred")
    with pytest.raises(ValueError, match="100 bytes are parked"):
        one.fetch(torch.zeros(99, dtype=torch.uint8))
    assert torch.equal(back(one), random_bytes(100))


def test_two_threads_store_and_fetch_at_once(make: Any) -> None:
    tier = make(64 * 4096)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for i in range(100):
                value = random_bytes(draw.randrange(1, 6000), 1000 * seed + i)
                one = tier.store(value.clone(), f"thread {seed}")
                if not torch.equal(back(one), value):
                    wrong.append((seed, i))
                one.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and tier.used_nbytes == 0


def test_a_closed_tier_says_so_and_may_be_closed_again(make: Any) -> None:
    before = threading.active_count()
    tier = make(8192)
    one = tier.store(random_bytes(4096), "late")
    tier.close()
    tier.close()
    assert threading.active_count() == before
    for action in (lambda: tier.store(random_bytes(1), "later"), lambda: one.fetch(torch.empty(4096, dtype=torch.uint8))):
        with pytest.raises(OffloadError, match="late.*closed"):
            action()
    one.release()


def test_two_threads_that_release_at_once_give_it_back_once(make: Any) -> None:
    tier = make(4 * 4096)
    one, other = (tier.store(random_bytes(4096, i), f"tensor {i}") for i in range(2))
    for parked in (one, other):
        parked.wait_stored()
    one.release()
    tier.release(one)  # as the thread that had asked whether it was released before the other one said so
    tier.release(one)
    assert tier.used_nbytes == 4096 and torch.equal(back(other), random_bytes(4096, 1))


def test_what_is_forgotten_is_given_back(make: Any) -> None:
    """Parked things that nobody releases, and a tier that nobody closes (an exception in between, an interpreter that ends)."""
    before = threading.active_count()
    tier = make(8192)
    tier.store(random_bytes(4096), "dropped").wait_stored()
    gc.collect()
    assert tier.used_nbytes == 0
    if isinstance(tier, DiskTier):
        tier = DiskTier(4096)
        threads, file = (tier._writer._thread, tier._reader._thread), tier.file._file
        del tier
        gc.collect()
        for thread in threads:
            thread.join(timeout=10)
        assert file.closed and threading.active_count() == before + 2


def test_a_forked_process_owns_nothing(make: Any) -> None:
    """A DataLoader's worker inherits the tier, without its threads: it may drop and close it, and is told where it uses it."""
    tier, value = make(8192), random_bytes(3000)
    one = tier.store(value.clone(), "parent's")
    one.wait_stored()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            told = 0
            for action in (lambda: tier.store(random_bytes(1), "child's"), lambda: back(one), one.wait_stored):
                try:
                    action()
                except OffloadError as error:
                    told += "belongs to process" in str(error)
            one.release()
            tier.close()
            if isinstance(tier, DiskTier):
                tier._finalizer()  # where the child ends as an interpreter does
                os.fstat(tier.file._file.fileno())
            code = 0 if told == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(back(one), value) and tier.used_nbytes > 0


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a mode")


def test_nobody_sees_the_copies(make: Any) -> None:
    """No dispatch mode (the recorder is one) and no version counter of a source; nothing depends on the default device."""
    torch.set_default_device("meta")
    try:
        tier = make(8192)
    finally:
        torch.set_default_device(None)
    with torch.inference_mode():
        inference = random_bytes(3000)
    for source in (inference, random_bytes(3000)):
        out = torch.zeros(3000, dtype=torch.uint8)
        with Refusing():
            one = tier.store(source, "unseen")
            one.wait_stored()
            one.fetch(out)
            one.wait_fetched()
            one.release()
        assert torch.equal(out, source)
        assert source.is_inference() or source._version == 0
