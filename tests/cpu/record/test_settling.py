"""Waiting for gloo's threads: which threads they are, until when, and what happens when they go (a folder stands for /proc)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_memopt.record import settling
from lightning_memopt.torch_private import GLOO_THREADS

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes what the system tells of a thread."""

    def thread(task: int, state: str, name: str = GLOO_THREADS) -> None:
        (tmp_path / str(task)).mkdir(exist_ok=True)
        (tmp_path / str(task) / "comm").write_text(f"{name}\n")
        (tmp_path / str(task) / "stat").write_text(f"{task} ({name}) {state} 1 2 3")

    monkeypatch.setattr(settling, "_TASKS", str(tmp_path))
    yield thread
    monkeypatch.undo()
    settling.find_threads()


def seconds() -> float:
    began = time.perf_counter()
    settling.settle()
    return time.perf_counter() - began


def test_only_threads_of_gloo_are_waited_for(write: Write) -> None:
    write(1, "R", "python) R")
    settling.find_threads()
    assert not settling.can_settle() and seconds() < settling._MOST_SECONDS
    write(2, "S")
    settling.find_threads()
    assert settling.can_settle() and seconds() < settling._MOST_SECONDS
    write(3, "R")
    assert seconds() < settling._MOST_SECONDS, "a thread of a group that was made later"
    settling.find_threads()
    assert settling._MOST_SECONDS <= seconds() < settling._MOST_SECONDS + 5


def test_until_the_thread_sleeps(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(2, "R")
    settling.find_threads()
    yields = []

    def yielded() -> None:
        yields.append(1)
        write(2, "R" if len(yields) < 3 else "S")

    monkeypatch.setattr(settling, "_MOST_SECONDS", 60.0)
    monkeypatch.setattr(settling.os, "sched_yield", yielded)
    settling.settle()
    assert len(yields) == 3


def test_a_thread_that_ended(write: Write, tmp_path: Path) -> None:
    write(2, "S")
    settling.find_threads()
    (tmp_path / "2" / "stat").unlink()
    (tmp_path / "2" / "comm").unlink()
    assert seconds() < settling._MOST_SECONDS and not settling.can_settle()


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settling, "_TASKS", str(tmp_path / "absent"))
    settling.find_threads()
    assert not settling.can_settle() and seconds() < settling._MOST_SECONDS
    monkeypatch.undo()
    settling.find_threads()
