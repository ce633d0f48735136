"""Texts that the ranks of a process group post for each other, in the store of that group.

A store needs no collective. So posts do not mix with the collectives of the training step, whose order all ranks must share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import distributed

from lightning_memopt.clocks import monotonic

BEAT_SECONDS = 3.0
"""A rank with a run posts a heartbeat so often."""


class Board:
    """The posts of one run.

    rank: this rank in the group.
    size: number of ranks in the group.
    """

    def __init__(self, store: distributed.Store, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # a connection of its own: torch may block the group's connection for minutes, and heartbeats must go on
        self._store = distributed.PrefixStore(f"memopt/{name}", store.clone())  # type: ignore[attr-defined]
        self._subjects = {"error", "errors"}  # a rank that failed may have left before it could delete these

    def post(self, about: str, text: str) -> None:
        """Post this rank's text about a subject. Raises torch's DistError where the store is gone."""
        self._subjects.add(about)
        self._store.set(f"{about}/{self.rank}", text)

    def read(self, about: str, rank: int) -> str | None:
        """What a rank has posted; None where it has not."""
        self._subjects.add(about)
        key = f"{about}/{rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def count(self, about: str) -> int:
        """How many ranks have asked for this count, this call included."""
        self._subjects.add(about)
        return int(self._store.add(about, 1))

    def clear(self) -> None:
        """Delete all posts and counts that this rank knows of, those of other ranks included."""
        for about in sorted(self._subjects):
            self._store.delete_key(about)
            for rank in range(self.size):
                self._store.delete_key(f"{about}/{rank}")
        self._subjects.clear()


class Heartbeat:
    """Posts that this process is alive, in a thread, from `start` to `stop`. `listen` is called after each post, also while the
    training waits in a collective.
    """

    def __init__(self, board: Board, listen: Callable[[], object]) -> None:
        self._board, self._listen = board, listen
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. A second call does nothing."""
        if self._thread is None:
            self._board.post("beat", "0")
            self._thread = threading.Thread(target=self._run, name="memopt heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End. Other ranks no longer wait for this one."""
        self._stopped.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        beats = 0
        while not self._stopped.wait(BEAT_SECONDS):
            beats += 1
            try:
                self._board.post("beat", str(beats))
                self._listen()
            except RuntimeError:  # the store is gone, and with it who would read
                return


class Pulse:
    """Whether the heartbeat of another rank goes on."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._beat: str | None = None
        self._heard = monotonic()

    @property
    def began(self) -> bool:
        """Whether the rank has ever posted a heartbeat."""
        return self._beat is not None

    def silent_seconds(self) -> float:
        """Seconds since the last new heartbeat."""
        beat, now = self._board.read("beat", self._rank), monotonic()
        if beat != self._beat:
            self._beat, self._heard = beat, now
        return now - self._heard
