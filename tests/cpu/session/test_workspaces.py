"""What is done on CUDA before a step is observed: cuBLAS takes its workspaces, and the allocator says its settings."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device import cuda
from lightning_memopt.plan.allocator import Settings
from lightning_memopt.session.judge.states import Waiting
from lightning_memopt.session.observe import observed_step, workspaces
from lightning_memopt.session.observe.effort import Effort
from lightning_memopt.session.observe.observed_step import ObservedStep
from lightning_memopt.session.observe.workspaces import take_workspaces
from lightning_memopt.session.solve.machine import machine_of
from tests.cpu.lib.device_thread import backward_in_its_own_thread

CUDA = torch.device("cuda", 0)


class Streams:
    """`torch.cuda`, with a current stream for each thread, and where a product ran: (thread, stream)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of_thread = threading.local()
        self.products: list[tuple[int, int]] = []
        multiply = workspaces._multiply
        ones = torch.ones

        def noted(device: torch.device) -> None:
            multiply(torch.device("cpu"))
            self.products.append((threading.get_ident(), self.now()))

        self.weights: list[torch.device] = []  # where those of checksums were made
        patch.setattr(workspaces, "checksum_weights", self.weights.append)
        patch.setattr(workspaces, "_of_thread", threading.local())
        patch.setattr(workspaces, "_multiply", noted)
        patch.setattr(workspaces, "current", lambda device: contextlib.nullcontext())
        patch.setattr(workspaces, "in_own_thread", lambda measure, device: measure())
        patch.setattr(torch, "ones", lambda *size, **options: ones(*size, **options | {"device": "cpu"}))
        patch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(stream_id=self.now()))
        patch.setattr(torch.cuda, "stream", self.stream)

    def now(self) -> int:
        return getattr(self.of_thread, "stream", 0)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.of_thread.stream = self.now(), stream.stream_id
        yield
        self.of_thread.stream = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_both_threads_take_a_workspace_once_for_each_stream(streams: Streams) -> None:
    model, here = nn.Linear(4, 4), threading.get_ident()
    with backward_in_its_own_thread():
        for _ in range(2):
            take_workspaces(model, CUDA)
        (first, _), (second, _) = streams.products
        assert first == here and second != here, "the thread of the forward, and the one of backward"
        assert set(streams.weights) == {CUDA}
        with streams.stream(types.SimpleNamespace(stream_id=7)):
            take_workspaces(model, CUDA)
    assert [thread for thread, _ in streams.products] == [here, second] * 2
    assert streams.products[2] == (here, 7)


def test_a_model_without_a_matrix_takes_none(streams: Streams) -> None:
    take_workspaces(nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)), CUDA)
    take_workspaces(nn.Linear(4, 4), torch.device("cpu"))
    assert streams.products == []


def test_all_is_done_before_a_step_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(observed_step, "take_workspaces", lambda model, device: events.append("workspaces"))
    monkeypatch.setattr(observed_step, "Observation", lambda *_, **__: events.append("observation"))
    ObservedStep(nn.Linear(2, 2), [], MemOptConfig(), Effort(bounded=True)).begin(Waiting(), CUDA, None)
    assert events == ["workspaces", "observation"]


def test_plans_are_priced_by_the_settings_that_the_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script has changed these settings since the process began."""
    backend = "native"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(cuda, "allocator_snapshot", lambda: {"allocator_settings": {"expandable_segments": True}})
    assert machine_of(CUDA).allocator == Settings(expandable=True)
    assert machine_of(torch.device("cpu")).allocator == Settings.from_environment()
    backend = "cudaMallocAsync"
    assert machine_of(CUDA).allocator == Settings.from_environment()
