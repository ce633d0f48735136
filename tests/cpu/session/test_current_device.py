"""With several GPUs: threads of our own use the device of the model, not device 0, and only its bytes are counted."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightning_memopt import MemOptConfig
from lightning_memopt.device.places import current, is_on
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import Machine
from lightning_memopt.record import Origin, StorageVersion, Tape
from lightning_memopt.runtime import Learned
from lightning_memopt.runtime.tiers.worker import Copy, Worker
from lightning_memopt.session.observe import costs
from lightning_memopt.session.observe.costs import Costs
from lightning_memopt.session.observe.resident import resident_nbytes
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve import rehearsal
from lightning_memopt.session.solve.rehearsal import Update, rehearse, with_gradients
from lightning_memopt.session.solve.solving import frontier_of
from lightning_memopt.session.times import Times
from lightning_memopt.trace.tracer import Tracer
from tests.cpu.lib.models import Body, data, made
from tests.cpu.lib.observed_graph import graph_of
from tests.cpu.lib.times import given

ZERO, ONE, ANY = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda")
COSTS = Costs(1e-6, 0.0, 1e-6, 1e-6)


@pytest.fixture
def current_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The current device of each thread, as CUDA has it: 0 where nobody has set it."""
    of_thread = threading.local()

    def now() -> int:
        return getattr(of_thread, "index", 0)

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, of_thread.index = now(), wanted.index
        yield
        of_thread.index = before

    of_thread.index = 2  # the user's thread has set it, as each rank does
    fake = types.SimpleNamespace(device=device, current_device=now)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: fake)
    return now


@pytest.mark.parametrize(("given_device", "index"), [(torch.device("cuda", 1), 1), (torch.device("cuda"), 2), (None, 2)])
def test_our_own_work_is_measured_on_the_device_of_the_model(
    given_device: torch.device | None, index: int, current_device: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measured(device: torch.device, nbytes: int = 0) -> Costs:
        seen.append((device, current_device(), threading.current_thread() is threading.main_thread()))
        return COSTS

    given(monkeypatch, Times())
    monkeypatch.setattr(costs, "_measured", measured)
    monkeypatch.setattr(costs, "_known", {})
    graph = types.SimpleNamespace(device="cuda", forward=())
    assert costs.measured(graph, given_device) is COSTS  # type: ignore[arg-type]
    assert seen == [(torch.device("cuda", index), index, False)]
    assert current_device() == 2


def test_a_solve_passes_the_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's device, with its number: a graph only knows the type."""
    asked: list[Any] = []
    measured = costs.measured
    monkeypatch.setattr(costs, "measured", lambda graph, device=None: asked.append(device) or measured(graph, device))
    model, x = made(Body), data(4, 16)
    graph = graph_of(model, (x,), lambda: model(x).sum())
    offloading = Offloading(torch.device("cpu"), MemOptConfig(verbose=False, offload="disk"))
    offloading.device = torch.device("cpu", 0)
    frontier_of(graph, offloading, lambda _: None, Machine())
    offloading.depots.close()
    assert set(asked) == {torch.device("cpu", 0)} and len(asked) == 2, "for plans that rebuild, and for those that park"


def test_the_disk_tiers_threads_work_on_their_device(current_device: Callable[[], int]) -> None:
    worker, seen = Worker("copies", partial(current, torch.device("cuda", 1))), list[int]()
    copy = Copy(lambda: seen.append(current_device()))
    worker.submit(copy)
    copy.wait()
    worker.close()
    assert seen == [1] and copy.error is None


def test_a_device_that_cannot_be_set_is_the_copys_error() -> None:
    def around() -> Any:
        raise RuntimeError("no such device")

    worker, copy = Worker("copies", around), Copy(lambda: None)
    worker.submit(copy)
    copy.wait()
    worker.close()
    assert str(copy.error) == "no such device"


def test_another_device_of_the_same_type_is_another_device() -> None:
    assert is_on(ZERO, ZERO) and not is_on(ZERO, ONE) and not is_on(torch.device("cpu"), ZERO)
    assert is_on(ANY, ONE) and is_on(ONE, ANY), "where one has no number, its type decides"


class On:
    """A tensor of 1000 bytes on a device that is not here."""

    layout = torch.strided
    nbytes = 1000

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cdata = id(self)

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(_cdata=id(self), nbytes=lambda: self.nbytes)


def test_tensors_of_another_gpu_are_not_charged_to_the_budget() -> None:
    """A model in two parts, one on each GPU, and a budget for the first."""
    tensors = [(On(device), "parameter", "weight") for device in (ZERO, ZERO, ONE)]
    assert resident_nbytes(tensors, ZERO) == 2000  # type: ignore[arg-type]
    tracer = Tracer(ZERO, lambda: "")
    tape: Tape[Any] = Tape(lambda: None)
    for i, (t, _, name) in enumerate(tensors):
        version = StorageVersion(i, torch.empty(250), tape, Origin.EXTERNAL)
        version.device = t.device
        tracer._birth(version, name, BEFORE)
    assert [seen.nbytes for seen in tracer.tensors.values()] == [1024, 1024, 0]


def test_tensors_of_another_gpu_have_no_bytes_in_the_plan() -> None:
    """Ops that read or make such tensors, including copies between the two devices, still belong to the plan."""
    learned = Learned(types.SimpleNamespace(graph=types.SimpleNamespace(device="cuda", forward=())))  # type: ignore[arg-type]
    learned.device = ZERO
    assert [learned.counted_nbytes(1000, device) for device in (ZERO, ONE)] == [1024, 0]


def test_updates_of_parameters_on_another_gpu_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.zeros(100)
    groups = with_gradients(optimizer)
    here = rehearse(optimizer, groups, torch.device("cpu"), lambda nbytes: nbytes)
    monkeypatch.setattr(rehearsal, "is_on", lambda device, where: False)
    elsewhere = rehearse(optimizer, groups, torch.device("cpu"), lambda nbytes: nbytes)
    assert here.state_nbytes >= 800 and elsewhere == Update()
