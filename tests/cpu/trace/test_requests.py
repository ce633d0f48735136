"""Which entries of the allocator's record belong to which op, by the counts of allocations and frees around each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memopt.device import cuda
from lightning_memopt.device.backends import backend_of
from lightning_memopt.trace.requests import Requests

CUDA = torch.device("cuda", 0)
RECORD = [("alloc", 1, 100), ("alloc", 2, 7), ("free_requested", 2, 7), ("free_completed", 2, 7), ("alloc", 2, 50)]
RECORD += [("free_requested", 1, 100), ("alloc", 3, 9), ("free_requested", 3, 9)]
SPANS = [((0, 0), (2, 1)), ((2, 1), (3, 1)), ((3, 2), (4, 3))]
"""Before and behind each op. Between the last two, the user frees a tensor."""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A build for CUDA, in which nobody else records. What is called."""
    calls: list[str] = []
    trace = [dict(zip(("action", "addr", "size"), entry, strict=True)) for entry in RECORD]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(cuda, "C", type("C", (), {"_cuda_isHistoryEnabled": staticmethod(lambda: bool(calls))}))
    monkeypatch.setattr(cuda, "allocator_history", lambda enabled, **_: calls.append(str(enabled)))
    monkeypatch.setattr(cuda, "allocator_snapshot", lambda: {"device_traces": [trace]})
    return calls


def asked(counts: tuple[int, int], more: int = 0) -> dict[int, tuple[int, ...]]:
    """Of ops in a process that had allocated `more` times before."""
    of: Any = Requests(backend_of(CUDA))
    for i, (before, behind) in enumerate(SPANS):
        of.begin(i, (before[0] + more, before[1]))
        of.end((behind[0] + more, behind[1]))
    found = dict(of.of_ops((counts[0] + more, counts[1])))
    of.close()
    return found


@pytest.mark.parametrize("more", [0, 1000])
def test_requests_of_ops(record: list[str], more: int) -> None:
    assert asked((4, 3), more) == {0: (100, 7, -2), 1: (50,), 2: (9, -1)}
    assert record == ["all", "None"]


def test_nothing_is_said_where_the_record_is_too_short(record: list[str]) -> None:
    """Its oldest entries are gone: the first op had more."""
    assert asked((40, 30)) == {}


def test_an_op_that_raised_is_replaced(record: list[str]) -> None:
    of = Requests(backend_of(CUDA))
    of.begin(0, (0, 0))
    of.begin(0, (2, 1))
    of.end((3, 1))
    assert of.of_ops((4, 3)) == {0: (50,)}


def test_a_record_of_the_user_stays(record: list[str]) -> None:
    record.append("the user's")
    assert not Requests(backend_of(CUDA)).records
    assert record == ["the user's"]
