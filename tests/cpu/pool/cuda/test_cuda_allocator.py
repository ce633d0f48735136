"""The allocator around torch's: what a stream's plan gives, what it leaves to torch's, and when ranges are used again."""

from __future__ import annotations

import os
import threading

from lightning_memopt.native import StreamPool
from tests.cpu.pool.cuda.fake import Fake


def begun(pool: StreamPool, sizes: list[int], offsets: list[int | None] | None = None, arena_nbytes: int | None = None) -> int:
    """Begin a window. By default sizes are stacked in 512 bytes each. Returns the number of the plan."""
    given: list[int | None] = [512 * i for i in range(len(sizes))] if offsets is None else offsets
    plan = pool.add(sizes, given)
    assert pool.begin(plan, arena_nbytes or max(512, 512 * len(sizes)))
    return plan


def allocated(cuda: Fake, sizes: list[int]) -> tuple[list[int], list[int]]:
    """(handles, addresses) of requests."""
    handles = [cuda.allocate(size) for size in sizes]
    return handles, [cuda.data(handle) for handle in handles]


def test_all_doors_of_torch_lead_through_it(cuda: Fake) -> None:
    cuda.allocator.check(0, 0)
    assert cuda.allocator.installed and cuda.live(0) == 0


def test_requests_are_logged_with_their_frees(cuda: Fake) -> None:
    pool = cuda.pool()
    pool.log()
    first, second = cuda.allocate(100), cuda.raw_alloc(700)
    cuda.delete(first)
    third = cuda.raw_alloc_with_stream(5, 0)
    assert cuda.raw_delete_of(second)
    pool.log_ends()
    assert pool.requests() == [(100, 2), (700, 3), (5, None)]
    assert cuda.raw_delete_of(third)


def test_planned_addresses_are_served_in_one_block(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100, 200, 300], [512, 0, None], 1024)
    assert cuda.live(0) == 1024 and cuda.blocks() == 1, "the arena is one block of the caching allocator"
    handles, addresses = allocated(cuda, [100, 200, 300])
    assert addresses[0] - addresses[1] == 512 and addresses[1] % 512 == 0
    assert cuda.live(0) == 1024 + 300, "torch counts the arena, and what is beside it"
    counts = pool.counts()
    assert (counts.served, counts.outside, counts.fallen) == (2, 1, 0)
    assert all(cuda.has_standard_deleter(handle) for handle in handles)
    for handle in handles:
        cuda.delete(handle)
    assert cuda.live(0) == 1024


def test_a_deviating_request_falls_through(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100] * 40, [0] * 40, 512)
    first = cuda.allocate(101)
    second, third = cuda.allocate(100), cuda.allocate(100)
    counts = pool.counts()
    assert (counts.differs, counts.served, counts.occupied) == (1, 1, 1)
    assert cuda.data(first) != cuda.data(third)
    for handle in (first, second, third):
        cuda.delete(handle)


def test_each_stream_has_its_own_sequence(cuda: Fake) -> None:
    main, side = cuda.pool(0), cuda.pool(5)
    begun(main, [100, 200])
    begun(side, [64, 32])
    one = cuda.allocate(100)
    cuda.on(0, 5)
    two = cuda.allocate(64)
    cuda.on(0, 0)
    three = cuda.allocate(200)
    four = cuda.raw_alloc_with_stream(32, 5)
    assert main.counts().served == side.counts().served == 2
    assert cuda.data(three) - cuda.data(one) == 512 == four - cuda.data(two)
    assert cuda.blocks() == 2, "an arena each"
    assert cuda.raw_delete_of(four)
    for handle in (one, two, three):
        cuda.delete(handle)


def test_another_device_is_left_alone(cuda: Fake) -> None:
    begun(cuda.pool(), [100])
    cuda.on(1, 0)
    other = cuda.allocate(100)
    assert cuda.live(1) == 100
    cuda.on(0, 0)
    assert cuda.pool().counts().served == 0
    cuda.delete(other)


def test_a_stream_that_nobody_named_is_noticed(cuda: Fake) -> None:
    begun(cuda.pool(), [100])
    cuda.on(0, 77)
    handle = cuda.allocate(100)
    assert cuda.pool().counts().served == 0
    pool = cuda.pool(77)
    assert pool.active and pool.number in [known.number for known in cuda.allocator.streams(0)]
    pool.forget()
    assert not pool.active
    cuda.delete(handle)


def test_the_thread_of_backward_is_served(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100, 200])
    handles = [cuda.allocate(100)]

    def backward() -> None:
        cuda.on(0, 0)
        handles.append(cuda.allocate(200))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert pool.counts().served == 2
    for handle in handles:
        cuda.delete(handle)


def test_a_range_is_used_again_after_its_other_streams(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100, 100, 100], [0, 512, 0], 1024)
    first, second = cuda.allocate(100), cuda.allocate(100)
    cuda.record_stream(first, 7)
    cuda.record_stream(first, 7)
    cuda.record_stream(first, 0)  # its own stream needs no event
    cuda.give(7)
    used = cuda.given(7)
    cuda.delete(first)
    assert cuda.events() == 1 and cuda.waits(0, 7) < used, "the arena's stream need not wait yet"
    cuda.give(7)  # work that comes after the free is not waited for
    cuda.delete(second)
    third = cuda.allocate(100)
    assert pool.counts().served == 3 and cuda.waits(0, 7) == used and cuda.events() == 0
    cuda.delete(third)


def test_an_arena_is_freed_after_its_other_streams(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100])
    handle = cuda.allocate(100)
    cuda.record_stream(handle, 8)
    cuda.give(8)
    pool.end(free=True)
    assert cuda.blocks() == 1, "its buffer keeps it"
    cuda.delete(handle)
    assert cuda.blocks() == 0 and cuda.events() == 0 and cuda.waits(0, 8) == cuda.given(8)


def test_streams_of_two_devices(cuda: Fake) -> None:
    """An event must be of its stream's device, and the default stream is that of the current one."""
    pool = cuda.pool()
    begun(pool, [100])
    handle = cuda.allocate(100)
    cuda.on(1, 0)
    cuda.record_stream(handle, 1001)
    cuda.give(1001)
    cuda.on(0, 0)
    pool.end(free=True)
    thread = threading.Thread(target=lambda: (cuda.on(1, 0), cuda.delete(handle)))
    thread.start()
    thread.join()
    assert cuda.wrong() == 0 and cuda.waits(0, 1001) == cuda.given(1001) > 0
    assert cuda.blocks() == 0


def test_without_events_the_host_waits(cuda: Fake) -> None:
    begun(cuda.pool(), [100])
    handle = cuda.allocate(100)
    cuda.record_stream(handle, 9)
    cuda.give(9)
    cuda.fails(1)
    cuda.delete(handle)
    cuda.fails(0)
    assert cuda.waits(0, 9) == cuda.given(9)


def test_record_stream_reaches_the_caching_allocator(cuda: Fake) -> None:
    """It ignores memory with another deleter than its own, and ours has another."""
    handle = cuda.allocate(100)
    cuda.record_stream(handle, 3)
    assert cuda.recorded(cuda.data(handle)) == 1 and cuda.blocks() == 1
    cuda.delete(handle)


def test_memory_of_an_arena_has_the_arenas_base(cuda: Fake) -> None:
    begun(cuda.pool(), [100, 100])
    handles, (first, second) = allocated(cuda, [100, 100])
    assert cuda.base_of(second) == first
    assert cuda.ipc_offset(second) == cuda.ipc_offset(first) + 512 == 64 + 512
    for handle in handles:
        cuda.delete(handle)


def test_unknown_pointers_are_the_caching_allocators(cuda: Fake) -> None:
    begun(cuda.pool(), [100])
    known = cuda.raw_alloc(333)
    assert cuda.raw_delete_of(known) and not cuda.raw_delete_of(known)
    served = cuda.raw_alloc(100)
    assert cuda.pool().counts().served == 1 and cuda.raw_delete_of(served)
    assert cuda.raw_delete_of(None)


def test_memory_of_cuda_graphs_is_left_alone(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100, 100], [0, None], 512)
    cuda.capture(0, 1)
    cuda.capture(0, 1)
    captured = cuda.allocate(100)
    assert cuda.live(0) == 512 + 100 and cuda.has_standard_deleter(captured)
    cuda.capture(0, 0)
    assert pool.counts() == pool.counts().__class__()
    cuda.capture(0, 0)
    planned = cuda.allocate(100)
    assert pool.counts().served == 1
    cuda.record_stream(planned, 4)
    pool.end(free=True)
    cuda.capture(0, 1)
    cuda.delete(planned)
    assert cuda.events() == 0 and cuda.live(0) == 512 + 100, "what waits for a stream waits for the capture's end"
    cuda.capture(0, 0)
    assert cuda.live(0) == 100
    cuda.delete(captured)
    state = cuda.checkpointed()
    assert cuda.has_standard_deleter(state), "torch compares them"
    cuda.delete(state)


def test_a_forked_process_frees_nothing_of_the_device(cuda: Fake) -> None:
    pool = cuda.pool()
    begun(pool, [100, 100])
    handle = cuda.allocate(100)
    cuda.record_stream(handle, 6)
    child = os.fork()
    if child == 0:
        pool.end(free=True)
        cuda.delete(handle)
        os._exit(0 if (cuda.blocks(), cuda.events(), pool.arenas_nbytes()) == (1, 0, (0, 0)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    second = cuda.allocate(100)
    assert pool.counts().served == 2, "the parent goes on"
    cuda.delete(second)
    cuda.delete(handle)


def test_without_memory_there_is_no_window(cuda: Fake) -> None:
    pool = cuda.pool()
    cuda.limit(1000)
    try:
        plan = pool.add([100], [0])
        trims = cuda.trims()
        assert not pool.begin(plan, 4096) and cuda.trims() == trims + 1, "cached memory was given back first"
        handle = cuda.allocate(100)
        assert cuda.live(0) == 100
        cuda.delete(handle)
    finally:
        cuda.limit(-1)


def test_the_most_bytes_beside_the_arena(cuda: Fake) -> None:
    held = cuda.allocate(5000)
    pool = cuda.pool()
    plan = begun(pool, [100, 700], [0, None], 512)
    peak = pool.outside_window()
    assert peak.peak_nbytes == 5000 == peak.reset()
    first, second = cuda.allocate(100), cuda.allocate(700)
    cuda.delete(second)
    third = cuda.allocate(10)
    assert peak.peak_nbytes == 5700 and pool.live_nbytes == 5000 + 512 + 10
    for handle in (first, third, held):
        cuda.delete(handle)
    pool.end(free=False)
    assert pool.begin(plan, 512) and peak.peak_nbytes == 0
