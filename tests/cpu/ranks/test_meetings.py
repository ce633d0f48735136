"""Meetings of ranks, one thread for each rank over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from lightning_memopt.errors import RankFailedError
from lightning_memopt.ranks import Ranks, board, of_collective, ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")
SIZE = 3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> distributed.Store:
    """A store, while ranks are patient for a second instead of a minute."""
    monkeypatch.setattr(board, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(ranks, "LAST_WORDS_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "_CHECK_SECONDS", 0.02)
    return distributed.HashStore()


def group(store: distributed.Store) -> list[Ranks]:
    """The same group as each of its ranks sees it. The global numbers of the ranks are 4, 5, 6."""
    return [Ranks(board.Board(store, "group/0", rank, SIZE), [4, 5, 6]) for rank in range(SIZE)]


def each(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls returned or raised, each in a thread of its own."""
    outcomes: list[Any] = [None] * len(calls)

    def run(i: int, call: Callable[[], Any]) -> None:
        try:
            outcomes[i] = call()
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def keys(store: distributed.Store) -> list[str]:
    return [key for key in store.list_keys() if "memopt" in key]


def test_all_hear_all_decisions_and_nothing_is_left(store: distributed.Store) -> None:
    members = group(store)
    for rank in members:
        rank.begin()
    for about in ("first", "second"):
        outcomes = each([lambda r=rank, a=about: r.meet(a, {"mine": r.name}, 5.0) for rank in members])  # type: ignore[misc]
        assert outcomes == [[{"mine": 4}, {"mine": 5}, {"mine": 6}]] * SIZE
    assert keys(store)
    for rank in members:
        rank.leave()
        rank.leave()  # leaving again counts once
    assert not keys(store)
    assert not [thread for thread in threading.enumerate() if "memopt" in thread.name]


def test_a_rank_that_lives_but_does_not_come_is_not_waited_for(store: distributed.Store) -> None:
    members = group(store)
    for rank in members:
        rank.begin()
    assert each([lambda r=rank: r.meet("plan", {}, 0.2) for rank in members[:2]]) == [None, None]  # type: ignore[misc]
    for rank in members:
        rank.leave()


def test_a_rank_without_a_run_is_not_waited_for(store: distributed.Store) -> None:
    members = group(store)
    members[0].begin()
    began = time.monotonic()
    assert members[0].meet("plan", {}, 0.1) is None
    assert time.monotonic() - began >= 1.0, "it may begin yet"
    members[0].leave()


def test_a_rank_whose_heartbeat_stops_is_named(store: distributed.Store) -> None:
    members = group(store)
    for rank in members:
        rank.begin()
    members[2]._heartbeat.stop()  # as if its process were killed
    for outcome in each([lambda r=rank: r.meet("plan", {}, 30.0) for rank in members[:2]]):  # type: ignore[misc]
        assert isinstance(outcome, RankFailedError) and "Rank 6 has been silent" in str(outcome)
    for rank in members:
        rank.leave()


def test_a_silent_rank_is_named_to_those_who_wait_for_another(store: distributed.Store) -> None:
    """One rank waits for the silent one and ends; a third waits for the second, and does not name that one."""
    members = group(store)
    for rank in members:
        rank.begin()
    members[2]._heartbeat.stop()
    waits = (lambda: members[0].hear("sizes", 2, 30.0), lambda: members[1].hear("shared plan", 0, 30.0))
    for outcome in each([*waits]):
        assert isinstance(outcome, RankFailedError) and str(outcome).startswith("Rank 6 has been silent")
    for rank in members:
        rank.leave()


def test_a_rank_that_fails_ends_a_meeting(store: distributed.Store) -> None:
    members = group(store)
    for rank in members:
        rank.begin()

    def fail() -> Any:
        time.sleep(0.2)
        return members[1].ended_by(ValueError("no data"))

    first, own, last = each([lambda: members[0].meet("plan", {}, 30.0), fail, lambda: members[2].meet("plan", {}, 30.0)])
    assert own is None, "its own error is the one to raise"
    for outcome in (first, last):
        assert isinstance(outcome, RankFailedError) and "Rank 5 failed, so all ranks end: ValueError: no data" in str(outcome)
    for rank in members:
        rank.leave()


def test_after_a_failed_collective_the_first_cause_is_named(store: distributed.Store) -> None:
    """Whether it was told before or after; a rank that says nothing is named, too; and an error is told once."""
    members = group(store)
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert of_collective(closed) and not of_collective(RuntimeError("shapes differ")) and not of_collective(ValueError("gloo"))
    named = members[0].ended_by(closed)
    assert "rank 5, 6 did not say why" in str(named)
    assert members[1].ended_by(KeyError("cat")) is None
    named = members[2].ended_by(closed)
    assert "Rank 5 failed, so all ranks end: KeyError: 'cat'" in str(named)
    assert members[2].ended_by(closed) is None
    for rank in members:
        rank.leave()
    assert not keys(store)


def test_a_rank_that_is_blocked_is_not_named(store: distributed.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank waits in a collective until the first has left, and the store with it. The third was killed."""
    members = group(store)
    for rank in members:
        rank.begin()
    members[2]._heartbeat.stop()
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    named = members[0].ended_by(closed)
    assert "rank 6 did not say why" in str(named)

    def lost(*_: Any) -> Any:
        raise distributed.DistNetworkError("Connection reset by peer")

    for name in ("post", "read", "count"):
        monkeypatch.setattr(members[1]._board, name, lost)
    assert str(members[1].ended_by(closed)) == str(named), "its heartbeat has heard the first rank's last words"
    for rank in members[:2]:
        rank.leave()


def test_no_rank_is_named_where_all_say_that_the_collective_failed(store: distributed.Store) -> None:
    members = group(store)
    closed = RuntimeError("NCCL error: unhandled")
    assert each([lambda r=rank: r.ended_by(closed) for rank in members]) == [None] * SIZE  # type: ignore[misc]
    for rank in members:
        rank.leave()


def test_a_store_that_is_gone_is_said(store: distributed.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    member = group(store)[0]

    def lost(*_: Any) -> Any:
        raise distributed.DistNetworkError("Connection reset by peer")

    for name in ("post", "read", "count"):
        monkeypatch.setattr(member._board, name, lost)
    with pytest.raises(RankFailedError, match="Rank 4 lost the store of the process group .*usually rank 4"):
        member.meet("plan", {}, 5.0)
    assert "the store of the process group is gone" in str(member.ended_by(RuntimeError("gloo: closed")))
    member._ended = False
    assert member.ended_by(ValueError("of its own")) is None
    member.leave()
