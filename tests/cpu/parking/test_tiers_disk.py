"""What only a disk can do: be full, fail in the middle, be slow, not be there, and leave files behind."""

from __future__ import annotations

import dis
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.errors import OffloadError
from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.runtime.tiers.base import buffer
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.runtime.tiers.worker import Copy
from tests.cpu.lib.tier_bytes import Gate, back, random_bytes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    made = DiskTier(16 * 4096, tmp_path)
    yield made
    made.close()


def test_users_may_resize_what_was_parked(tier: DiskTier) -> None:
    """Code that saves memory sets the storage of a tensor to 0 bytes; torch refuses that of memory that numpy has seen."""
    t = random_bytes(4096, seed=3)
    parked = tier.store(t, "a tensor")
    parked.wait_stored()
    out = torch.empty_like(t)
    parked.fetch(out)
    parked.wait_fetched()
    assert torch.equal(out, t)
    for used in (t, out):
        assert used.untyped_storage().resizable()
        used.untyped_storage().resize_(0)
    parked.release()


def test_the_memory_of_a_view_lives_as_long_as_the_view() -> None:
    t = random_bytes(64, seed=4)
    alive, expected, view = weakref.ref(t), bytes(t.tolist()), buffer(t)
    del t
    assert alive() is not None and bytes(view) == expected
    del view
    assert alive() is None


def test_a_disk_that_is_too_small_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """By the system: a limit on the size of files here, and a file system that reserves nothing."""
    threads = threading.active_count()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        for reserves in (True, False):
            if not reserves:
                monkeypatch.delattr(os, "posix_fallocate")
            with pytest.raises(OffloadError, match=r"cannot reserve 2097152 bytes \(2\.00 MiB\) in '.*': .*fewer bytes"):
                DiskTier(2 << 20, tmp_path)
            DiskTier(1 << 20, tmp_path).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


@pytest.mark.parametrize("reserves", [None, errno.EOPNOTSUPP, errno.ENOSPC])
def test_space_is_reserved_when_the_tier_opens(tmp_path: Path, monkeypatch: Any, reserves: int | None) -> None:
    """Also where the system cannot: zeros are written instead. Where there is no space, that is the error."""
    if reserves is not None:

        def fallocate(*args: Any) -> None:
            raise OSError(reserves, os.strerror(reserves))

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
    if reserves == errno.ENOSPC:
        with pytest.raises(OffloadError, match="No space left"):
            DiskTier(4096, tmp_path)
        return
    tier = DiskTier((3 << 20) + 4096, tmp_path)
    status = os.fstat(tier.file._file.fileno())
    assert status.st_size == tier.capacity_nbytes and status.st_blocks * 512 >= tier.capacity_nbytes
    assert status.st_nlink == 0 and list(tmp_path.iterdir()) == [], "there is no name to be left behind"
    tier.close()


@pytest.mark.parametrize("where", ["missing", "a file", "read-only"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").write_text("")
    directory = "/proc" if where == "read-only" else str(tmp_path / where)
    with pytest.raises(OffloadError, match=f"cannot make a file in '{directory}': .*another directory"):
        DiskTier(4096, directory)


def test_a_write_that_fails_in_the_middle_loses_nothing(tier: Any, monkeypatch: Any) -> None:
    """The system takes a part, then there is no space: said where the copy is waited for, asked about or fetched, each time."""
    real, calls = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        calls.append(len(data))
        if len(calls) % 2:
            return real(fd, data[:1000], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    source = random_bytes(5000)
    one = tier.store(source, "layer 7")
    expected = r"layer 7: copying 5000 bytes to the disk tier failed: No space left on device \(8\.00 KiB of 64\.00 KiB"
    for action in (one.wait_stored, one.wait_stored, one.stored, lambda: back(one)):
        with pytest.raises(OffloadError, match=expected) as error:
            action()
        assert "still on the device" in str(error.value)
    assert calls == [5000, 4000] and torch.equal(source, random_bytes(5000))
    one.release()
    monkeypatch.undo()
    assert tier.used_nbytes == 0 and torch.equal(back(tier.store(source, "layer 7 again")), source)


def test_writes_and_reads_may_be_short(tier: Any, monkeypatch: Any) -> None:
    """The system may move less than it is asked to: no error, and no byte is left out."""
    write, read, calls = os.pwrite, os.preadv, []
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: calls.append(1) or write(fd, data[:777], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: calls.append(1) or read(fd, [into[0][:333]], at))
    assert torch.equal(back(tier.store(random_bytes(5000), "short")), random_bytes(5000))
    assert len(calls) == -(-5000 // 777) + -(-5000 // 333)


@pytest.mark.parametrize("result", [0, errno.EIO])
def test_a_read_that_fails_may_be_tried_again(tier: Any, monkeypatch: Any, result: int) -> None:
    one = tier.store(random_bytes(5000), "attention.probs")

    def preadv(*args: Any) -> int:
        if result:
            raise OSError(result, os.strerror(result))
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(OffloadError, match=r"attention\.probs: copying 5000 bytes from the disk tier failed.*\(8\.00 KiB"):
            back(one)
    assert torch.equal(back(one), random_bytes(5000))


def test_without_positional_reads_the_same_bytes_come_back(tmp_path: Path, monkeypatch: Any) -> None:
    """Windows has neither; macOS had no `preadv` for long."""
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fallocate")
    tier = DiskTier(16 * 4096, tmp_path)
    parked = [tier.store(random_bytes(4000, i), f"tensor {i}") for i in range(16)]
    outs = [torch.empty(4000, dtype=torch.uint8) for _ in parked]
    for one, out in zip(parked, outs, strict=True):
        one.fetch(out)
    for i, one in enumerate(parked):
        one.wait_fetched()
        assert torch.equal(outs[i], random_bytes(4000, i))
    tier.close()


def test_without_positional_reads_threads_do_not_move_each_others_place(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("pwrite", "preadv"):
        monkeypatch.delattr(os, name)
    file = Scratch(2 * 4096, tmp_path)
    values = random_bytes(4096, 0), random_bytes(4096, 1)
    for i, value in enumerate(values):
        file.write(buffer(value), i * 4096)

    def write() -> None:
        while not ended:
            file.write(buffer(values[1]), 4096)

    ended: list[bool] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=write)
    thread.start()
    out = torch.empty(4096, dtype=torch.uint8)
    try:
        for _ in range(500):
            file.read(buffer(out), 0)
            assert torch.equal(out, values[0])
    finally:
        ended.append(True)
        thread.join()
        sys.setswitchinterval(interval)
        file.close()


def test_a_copy_that_comes_while_the_tier_closes_is_refused(tier: Any) -> None:
    """Behind the last one that the threads read, it would be waited for without end."""
    one = tier.store(random_bytes(10), "before")
    tier.close()
    tier.check = lambda what: None  # as for one that had asked just before
    with pytest.raises(OffloadError, match="between: the disk tier is closed"):
        tier.store(random_bytes(10), "between")
    with pytest.raises(OffloadError, match="before: the disk tier is closed"):
        one.fetch(torch.empty(10, dtype=torch.uint8))


def test_the_source_is_held_until_it_is_written_and_no_longer(tier: Any, monkeypatch: Any) -> None:
    gate = Gate(monkeypatch, "pwrite")
    one = tier.store(random_bytes(100), "held")
    held = weakref.ref(gate_source(one))
    assert gate.reached.wait(10) and not one.stored() and held() is not None
    gate.open.set()
    one.wait_stored()
    assert one.stored() and held() is None


def gate_source(parked: Any) -> Any:
    return parked._store._work.args[0]


def test_what_is_released_before_it_is_written_is_not_written(tier: Any, monkeypatch: Any) -> None:
    gate = Gate(monkeypatch, "pwrite")
    first, second, third = (tier.store(random_bytes(4096, i), f"tensor {i}") for i in range(3))
    assert gate.reached.wait(10)
    out = torch.empty(4096, dtype=torch.uint8)
    third.fetch(out)  # asked back before it was written, and let go at once
    for one in (first, second, third):
        one.release()
    assert tier.used_nbytes == 3 * 4096, "a place is free when no copy is on its way to it or from it"
    gate.open.set()
    third.wait_fetched()
    assert torch.equal(out, random_bytes(4096, 2))
    for one in (first, second):
        one._store.wait()
    assert second._store.error is not None and tier.used_nbytes == 0


def interrupted_at(call: int, action: Any, within: str = "") -> bool:
    """Do this, and raise KeyboardInterrupt after one of its calls, where Python looks for signals, in files with such paths.
    Whether it has that call.
    """
    left, last = call, dict[Any, str]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if within not in frame.f_code.co_filename:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= last.get(frame, "RESUME").startswith(("CALL", "RESUME"))
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_t7_an_interrupt_at_any_call_of_a_wait() -> None:
    """The copy ends, and whoever waits for it afterwards goes on."""
    for call in range(1000):
        copy = Copy(partial(time.sleep, 0.005))
        thread = threading.Thread(target=copy.run, daemon=True)
        thread.start()
        came = interrupted_at(call, copy.wait)
        thread.join(5)
        assert not thread.is_alive() and copy.ended, call
        copy.wait()
        if not came:
            break
    assert 1 < call < 1000


def opens(directory: Path) -> None:
    DiskTier(4 * 4096, directory)


def closes(directory: Path) -> None:
    DiskTier(4 * 4096, directory).close()


@pytest.mark.parametrize("does", (opens, closes))
def test_an_interrupt_at_any_call_leaves_no_thread(does: Any, tmp_path: Path) -> None:
    """Where the tier is made, closed, or ended by its finalizer."""
    before = threading.active_count()
    for call in range(1000):
        came = interrupted_at(call, partial(does, tmp_path), within="runtime/tiers")
        gc.collect()
        deadline = time.monotonic() + 10
        while threading.active_count() > before:
            assert time.monotonic() < deadline, call
            time.sleep(0.001)
        if not came:
            break
    assert 1 < call < 1000


def stores(tier: DiskTier) -> Any:
    return lambda: back(tier.store(random_bytes(4096), "a tensor"))


def releases(tier: DiskTier) -> Any:
    parked = tier.store(random_bytes(4096), "a tensor")
    parked.wait_stored()
    return parked.release


@pytest.mark.parametrize("begins", [stores, releases])
def test_t7_an_interrupt_at_any_call(begins: Any, tmp_path: Path) -> None:
    """No lock stays taken, copies go on, and all space is free again."""
    tier = DiskTier(4 * 4096, tmp_path)
    for call in range(1000):
        action = begins(tier)
        came = interrupted_at(call, action)
        del action
        gc.collect()
        assert not tier._lock.locked(), call
        last = tier.store(random_bytes(4096, seed=1), "another one")
        assert torch.equal(back(last), random_bytes(4096, seed=1))
        del last
        assert tier.used_nbytes == 0, call
        if not came:
            break
    assert 1 < call < 1000
    tier.close()


def test_a_wait_that_is_interrupted_can_be_taken_up_again(tier: Any, monkeypatch: Any) -> None:
    """Ctrl-C while the disk is slow: the exception comes at once, nothing is lost, and closing ends."""
    interrupted = 0
    mine = [thread for thread in threading.enumerate() if thread in (tier._writer._thread, tier._reader._thread)]

    def interrupt(action: Any) -> None:
        nonlocal interrupted
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        try:
            action()
        except KeyboardInterrupt:
            interrupted += 1
        assert time.monotonic() - began < 60

    def raises(*args: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raises)
    try:
        writes = Gate(monkeypatch, "pwrite")
        one = tier.store(random_bytes(4096), "slow")
        interrupt(one.wait_stored)
        writes.open.set()
        one.wait_stored()
        reads = Gate(monkeypatch, "preadv")
        out = torch.empty(4096, dtype=torch.uint8)
        one.fetch(out)
        interrupt(one.wait_fetched)
        interrupt(tier.close)
        reads.open.set()
        one.wait_fetched()
        assert torch.equal(out, random_bytes(4096)) and interrupted == 3
    finally:
        signal.signal(signal.SIGALRM, before)
    tier.close()
    assert len(mine) == 2 and not any(thread.is_alive() for thread in mine)


def test_closing_waits_for_what_is_being_copied_and_drops_the_rest(tier: Any, monkeypatch: Any) -> None:
    gate = Gate(monkeypatch, "pwrite")
    first, second = (tier.store(random_bytes(4096, i), f"tensor {i}") for i in range(2))
    assert gate.reached.wait(10)
    threading.Timer(0.1, gate.open.set).start()
    tier.close()
    assert first.stored()
    with pytest.raises(OffloadError, match="tensor 1: the disk tier is closed"):
        second.wait_stored()


KILLED = """
import os, signal, sys, torch
from lightning_memopt.runtime.tiers import DiskTier
tier = DiskTier(1 << 20, sys.argv[1])
tier.store(torch.ones(1 << 19, dtype=torch.uint8), "killed").wait_stored()
print(os.listdir(sys.argv[1]), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raise":
    raise RuntimeError("a step that fails")
"""


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_no_file_outlives_its_process(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[]\n" and list(tmp_path.iterdir()) == []
    assert done.returncode == {"kill": -signal.SIGKILL, "raise": 1}[how], done.stderr
