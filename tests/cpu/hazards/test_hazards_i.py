"""Hazards of offloading (I): copies that fail, are late or interrupted, and what other tiers do; named by their ids.

I1 to I4, I6, I9, I10 and I12 are about streams, events and pools: tests/cpu/parking/test_tiers_host.py runs them through
streams that keep what is queued (tests/cpu/lib/fake_streams.py), tests/gpu/test_tiers_cuda.py on a card. Here a training
step sees them.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.errors import OffloadError
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier, HostTier, disk, host
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.scratch import Scratch
from tests.cpu.lib.fake_streams import Streams
from tests.cpu.lib.loops import batches, loss_of, small
from tests.cpu.lib.stepped import Stepped, held, same


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    model, (batch,) = small(width=64, depth=4), batches(1)
    found = Stepped(model, lambda: loss_of(model, batch))
    yield found
    found.depot.close()


def failing(monkeypatch: Any, name: str, count: int = 1, error: BaseException | None = None) -> None:
    """The first `count` calls of a method of the disk tier's file fail."""
    real, left = getattr(Scratch, name), [count]

    def call(self: Scratch, data: memoryview, offset: int) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error or OSError(errno.EIO, "Input/output error")
        real(self, data, offset)

    monkeypatch.setattr(Scratch, name, call)


def slow(monkeypatch: Any, name: str, seconds: float = 0.003) -> None:
    real = getattr(Scratch, name)

    def call(self: Scratch, data: memoryview, offset: int) -> None:
        time.sleep(seconds)
        real(self, data, offset)

    monkeypatch.setattr(Scratch, name, call)


# -- late ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write", "read"])
def test_i2_i3_i6_slow_copies_are_waited_for(stepped: Stepped, monkeypatch: Any, name: str) -> None:
    """A copy out that has not ended holds its bytes, and one back is read only when it is there."""
    expected, programs = stepped.step(), [stepped.away(), stepped.away(held(stepped.graph, 3))]
    slow(monkeypatch, name)
    for program in programs:
        assert same(expected, stepped.step(program))


def test_i3_backward_arrives_before_the_copies(stepped: Stepped, monkeypatch: Any) -> None:
    """Writes end only when reads of them wait already (the order that was silent in Megatron-LM)."""
    expected, program = stepped.step(), stepped.away()
    slow(monkeypatch, "write", 0.002)
    program.__dict__.update(fences=[], fence_of={})  # no wait in forward: backward finds copies on their way
    assert same(expected, stepped.step(program))


def test_i4_memory_is_not_used_again_before_its_copy_has_ended(stepped: Stepped, monkeypatch: Any) -> None:
    """Whoever else lets go of a tensor: its bytes are those that were packed, although the allocator is asked at once."""
    program, expected = stepped.away(), stepped.step()
    slow(monkeypatch, "write", 0.001)
    stop = threading.Event()

    def corrupt() -> None:
        while not stop.is_set():
            for nbytes in {t.nbytes for t in stepped.graph.tensors if t.nbytes >= 1024}:
                torch.full((nbytes,), 0x7B, dtype=torch.uint8)

    thread = threading.Thread(target=corrupt)
    thread.start()
    try:
        assert same(expected, stepped.step(program))
    finally:
        stop.set()
        thread.join()


def test_i7_backward_in_another_order(stepped: Stepped) -> None:
    """Parts of the graph in any order, on any thread: nothing depends on the order that was observed."""
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    x = torch.randn(32, 64)

    def losses() -> list[Tensor]:
        h = torch.tanh(model[0](x))
        return [torch.sigmoid(model[i](h)).sin().mean() for i in (1, 2, 3)]

    heads: list[Tensor] = []

    def loss() -> Tensor:
        heads[:] = losses()
        return sum(heads)  # type: ignore[return-value]

    one = Stepped(model, loss)
    heads.clear()
    for program in (None, one.away(), one.away(held(one.graph, 2)), one.away(held(one.graph, 3))):
        for order in ((2, 1, 0), (0, 1, 2), (1, 2, 0)):
            one.forward(program)
            for n, i in enumerate(order):
                heads[i].backward(retain_graph=n < 2)
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            heads.clear()
            if program is None and order == (2, 1, 0):
                expected = {order: found}
            elif program is None:
                expected[order] = found
            else:
                assert same(expected[order], found), order
            assert one.used_nbytes() == 0
    one.depot.close()


def test_i7_only_a_part_of_backward(stepped: Stepped) -> None:
    """`inputs=` of some parameters: the rest is never asked for, and nothing of it stays."""
    some = list(stepped.model.parameters())[-2:]
    for p in (None, stepped.away(), stepped.away(held(stepped.graph, 2))):
        loss = stepped.forward(p)
        loss.backward(inputs=some)
        found = stepped.outcome(loss)
        if p is None:
            expected = found
        assert same(expected, found)
        del loss
        gc.collect()
        assert stepped.used_nbytes() == 0


# -- failures --------------------------------------------------------------------------------------------


def test_i13_a_write_that_fails_names_the_tensor_and_loses_nothing(stepped: Stepped, monkeypatch: Any) -> None:
    expected, program = stepped.step(), stepped.away()
    failing(monkeypatch, "write")
    with pytest.raises(OffloadError, match=r"copying \d+ bytes to the disk tier failed: Input/output error"):
        stepped.step(program)
    gc.collect()
    assert stepped.used_nbytes() == 0
    assert same(expected, stepped.step(program)), "the disk works again"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["error", "interrupt"])
def test_i13_a_read_that_fails_is_not_taken_for_complete(stepped: Stepped, monkeypatch: Any, error: Any) -> None:
    """A6: the failed copy's memory holds rubbish; a second try of backward copies again."""
    for program in (stepped.away(), stepped.away(held(stepped.graph, 2))):
        expected = stepped.step()
        loss = stepped.forward(program)
        with monkeypatch.context() as patch:
            failing(patch, "read", error=error)
            with pytest.raises(OffloadError, match=r"copying \d+ bytes from the disk tier failed"):
                loss.backward(retain_graph=True)
        stepped.model.zero_grad()
        loss.backward()
        assert same(expected, stepped.outcome(loss))
        del loss
        gc.collect()
        assert stepped.used_nbytes() == 0


@pytest.mark.parametrize("where", ["wait_stored", "wait_fetched"])
def test_i13_an_interrupt_in_the_middle_of_a_wait(stepped: Stepped, monkeypatch: Any, where: str) -> None:
    """Ctrl-C propagates; bytes go back to the tier; the next step, and a second try of the same backward, are exact."""
    program = stepped.away()
    expected = stepped.step()
    real, left = getattr(disk._DiskParked, where), [3]

    def wait(self: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(disk._DiskParked, where, wait)
    with pytest.raises(KeyboardInterrupt):
        loss = stepped.forward(program)
        loss.backward(retain_graph=True)
    if where == "wait_fetched":
        stepped.model.zero_grad()
        loss.backward()
        assert same(expected, stepped.outcome(loss))
        del loss
    gc.collect()
    assert stepped.used_nbytes() == 0
    assert same(expected, stepped.step(program))


def test_i13_a_tier_that_is_closed_meanwhile(stepped: Stepped) -> None:
    """A graph that outlives the session's tier: a named error, no crash, and no bytes of another tensor."""
    loss = stepped.forward(stepped.away())
    stepped.depot.close()
    for _ in range(3):  # nor by who asks again
        with pytest.raises(OffloadError, match="closed"):
            loss.backward(retain_graph=True)


def test_i10_i11_what_does_not_fit_stays_on_the_device(tmp_path: Path) -> None:
    """P14: the tier never grows; what it has no room for stays, and is counted."""
    model, (batch,) = small(width=64, depth=4), batches(1)
    one = Stepped(model, lambda: loss_of(model, batch))
    expected, program = one.step(), one.away()
    loss = one.forward(program)
    needed = one.depot.tiers["disk"].used_nbytes  # type: ignore[attr-defined]
    del loss
    for room in (needed // 2, needed):
        one.depot.close()
        one.depot = Depot({"disk": DiskTier(room, tmp_path)})
        for _ in range(3):
            assert same(expected, one.step(program))
            assert (one.deviation.unparked_nbytes > 0) is (room < needed)
            assert one.used_nbytes() == 0
    one.depot.close()
    with pytest.raises(OffloadError, match="left on this machine"):
        HostTier(1 << 60, "cpu")
    assert not os.listdir(tmp_path)


def test_i8_without_a_device_nothing_is_locked(monkeypatch: Any) -> None:
    """The host tier where memory cannot be locked: pageable memory, the same bits (on the CPU nothing is locked at all)."""
    model, (batch,) = small(width=64, depth=4), batches(1)
    one = Stepped(model, lambda: loss_of(model, batch))
    expected = one.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.depot.close()
        one.depot = Depot({"host": HostTier(1 << 24, "cpu")})
    for program in (one.away(form="host"), one.away(held(one.graph, 3), form="host")):
        for _ in range(2):
            assert same(expected, one.step(program))
    one.depot.close()


def test_p13_no_order_that_events_allow_changes_a_bit(monkeypatch: Any) -> None:
    """A whole training step over streams that run what is queued as late, and in such an order, as events allow."""
    model, (batch,) = small(width=64, depth=3), batches(1)
    one = Stepped(model, lambda: loss_of(model, batch))
    expected, program = one.step(), one.away(form="host")
    one.depot.close()
    for seed in range(6):
        fake = Streams(seed)
        with monkeypatch.context() as patch:
            patch.setattr(streams_module, "copy", fake.copy)
            tier = HostTier(1 << 24, "cpu", streams=fake)
            one.depot = Depot({"host": tier})
            _on_compute(patch, fake)
            assert same(expected, one.step(program)), seed
            fake.drain()


def _on_compute(patch: Any, fake: Streams) -> None:
    """Ops of the CPU run at once: before they read or free what a copy touches, the compute stream has run so far."""
    for name in ("wait_stored", "wait_fetched"):
        real: Callable[[Any], None] = getattr(host._HostParked, name)

        def wait(self: Any, real: Callable[[Any], None] = real) -> None:
            real(self)
            done: list[bool] = []
            fake.compute.queue.append(lambda: done.append(True))
            while not done:
                assert fake.step()

        patch.setattr(host._HostParked, name, wait)


# -- nothing stays ---------------------------------------------------------------------------------------


def test_p11_no_reference_cycle(stepped: Stepped) -> None:
    """With the collector off, engine, tape and bytes go with the loss; also where backward never ran, or failed."""
    programs: list[Program] = [stepped.away(), stepped.away(held(stepped.graph, 2))]
    gc.collect()
    gc.disable()
    try:
        for program in programs:
            for runs in (0, 1, 2):
                loss = stepped.forward(program)
                engines = [weakref.ref(o) for o in _engines()]
                for n in range(runs):
                    loss.backward(retain_graph=n + 1 < runs)
                del loss
                assert stepped.used_nbytes() == 0
                assert engines and not any(ref() for ref in engines)
    finally:
        gc.enable()


def _engines() -> list[Any]:
    return [o for o in gc.get_objects() if type(o) is PlannedEngine]


def test_i10_a_hundred_steps_of_other_sizes_leave_the_tier_empty() -> None:
    """And take it in the same bounds."""
    model = small(width=32, depth=2)
    data = {n: batches(1, size=n)[0] for n in (8, 13, 24, 48)}
    now = [48]
    one = Stepped(model, lambda: loss_of(model, data[now[0]]))
    program = one.away()
    expected = {}
    for n in data:
        now[0] = n
        expected[n] = one.step()
    for i in range(100):
        now[0] = (8, 13, 24, 48)[i % 4]
        assert same(expected[now[0]], one.step(program, sized=False))
        assert one.used_nbytes() == 0
    one.depot.close()


def test_c5_n2_parameters_and_views_of_them_never_leave() -> None:
    """C5: a weight is saved as a view of it; N2: what was there before the step is told by its storage."""
    model, (batch,) = small(width=64, depth=4), batches(1)
    one = Stepped(model, lambda: loss_of(model, batch))
    tensors = one.graph.tensors
    parameters = {t.storage for t in tensors if t.kind in ("parameter", "buffer", "input")}
    program = one.away(least=1)
    assert parameters and not parameters & {tensors[t].storage for t in program.parked}
    one.depot.close()
