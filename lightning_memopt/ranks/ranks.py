"""The ranks that train one model together: meetings at which all hear what each decided, and the name of a rank that failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import Any

from torch import distributed

from lightning_memopt.clocks import monotonic
from lightning_memopt.errors import RankFailedError
from lightning_memopt.ranks import board
from lightning_memopt.ranks.board import Board, Heartbeat, Pulse

SILENT_SECONDS = 40.0
"""A rank whose heartbeat stopped so long ago is taken to be dead. Errors about it come within a minute."""
LAST_WORDS_SECONDS = 8.0
"""After a collective failed, the other ranks have so long to say what happened to them."""
_POLL_SECONDS = (0.0002, 0.05)
"""The shortest and the longest pause between two looks at the store."""
_CHECK_SECONDS = 0.5
"""Heartbeats and last words are looked at so often while this rank waits."""
_TEXT = 400
"""The longest message of another rank's error that is repeated, in characters."""


class Ranks:
    """The ranks of one process group.

    rank: this rank in the group.
    size: number of ranks in the group.
    names: the global number of each rank, which errors name.
    """

    def __init__(self, posts: Board, names: list[int]) -> None:
        self.rank, self.size, self.names = posts.rank, posts.size, names
        self._board = posts
        self._heartbeat = Heartbeat(posts, self._last_words)
        self._words_of: dict[int, dict[str, Any]] = {}  # what ended other ranks, by rank
        self._ended = self._left = self._alone = False
        self._gone: set[int] = set()  # ranks whose process has ended, as far as this rank knows
        self._alive: set[int] = set()  # ranks whose heartbeat went on while this rank waited for last words

    @property
    def name(self) -> int:
        """The global number of this rank."""
        return self.names[self.rank]

    def begin(self) -> None:
        """This rank has a run: others may wait for it."""
        self._heartbeat.start()

    def alone(self) -> None:
        """This rank decides by itself from now on. The others may have no run, so it clears its own posts in the end."""
        self._alone = True
        self._heartbeat.stop()

    # -- meetings ----------------------------------------------------------------------------------

    def meet(self, about: str, decision: dict[str, Any], seconds: float) -> list[dict[str, Any]] | None:
        """Post a decision, and wait for those of all ranks, in the order of ranks. Every rank comes to a meeting once.

        Returns None where a rank does not come in `seconds`, although it has not failed: its loop does something else, or it
        has no run of its own. Raises RankFailedError where a rank failed.
        """
        self.tell(about, decision)
        decisions: list[dict[str, Any]] = []
        for rank in range(self.size):
            heard = self.hear(about, rank, seconds)
            if heard is None:
                return None
            decisions.append(heard)
        return decisions

    def tell(self, about: str, decision: dict[str, Any]) -> None:
        """Post a decision. Raises RankFailedError where the store is gone."""
        self._ask(lambda: self._board.post(about, json.dumps(decision)))

    def hear(self, about: str, rank: int, seconds: float) -> dict[str, Any] | None:
        """The decision of one rank, as soon as it is there. Returns and raises as `meet` does."""
        text = self._ask(lambda: self._await(about, rank, seconds))
        return None if text is None else json.loads(text)

    def _await(self, about: str, rank: int, seconds: float) -> str | None:
        pulse, pause = Pulse(self._board, rank), _POLL_SECONDS[0]
        began = checked = monotonic()
        while True:
            text = self._board.read(about, rank)
            if text is not None:
                return text
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            now = monotonic()
            if now - checked < _CHECK_SECONDS:
                continue
            checked = now
            words_of = self._last_words()
            if words_of:
                raise self._failed(words_of)
            silent_seconds = pulse.silent_seconds()
            if pulse.began and silent_seconds > SILENT_SECONDS:
                self._gone.add(rank)
                error = RankFailedError(
                    f"Rank {self.names[rank]} has been silent for {silent_seconds:.0f} s while rank {self.name} waited for its "
                    f"decision ({about}): its process has ended or hangs. Run all ranks again."
                )
                self._relay(str(error))
                raise error
            if now - began > seconds if pulse.began else silent_seconds > SILENT_SECONDS:
                return None

    def _relay(self, why: str) -> None:
        """Tell the ranks that wait for this one what ends it. The store may end with this process, so they get time to read."""
        if not self._ended:
            self._ended = True
            words = {"order": self._board.count("errors"), "collective": False, "error": why, "relayed": True}
            self._board.post("error", json.dumps(words))
            time.sleep(2 * _CHECK_SECONDS)

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except distributed.DistError as error:
            raise RankFailedError(
                f"Rank {self.name} lost the store of the process group ({_short(error)}): the process that holds "
                f"it, usually rank {self.names[0]}, has ended. Run all ranks again."
            ) from error

    # -- failures ----------------------------------------------------------------------------------

    def ended_by(self, error: BaseException) -> RankFailedError | None:
        """This rank's run ends with an error. Tells the others, and returns an error that names the rank that failed first;
        None where this rank is the first, or has left. Waits a few seconds where a collective failed and the others have not
        said why.
        """
        if self._ended or self._left or isinstance(error, RankFailedError):
            return None
        self._ended = True
        collective = of_collective(error)
        try:
            order = self._board.count("errors")
            words = {"order": order, "collective": collective, "error": f"{type(error).__name__}: {_short(error)}"}
            self._board.post("error", json.dumps(words))
            if not collective:
                return None
            self._await_last_words()
        except distributed.DistError:
            if not collective:
                return None
            if self._words_of:  # they were heard before the process that holds the store ended, too
                return self._failed(self._words_of, self._alive)
            return RankFailedError(
                f"A collective failed on rank {self.name}, and the store of the process group is gone: the process "
                f"that holds it, usually rank {self.names[0]}, has ended. Run all ranks again."
            )
        words_of = self._words_of
        if len(words_of) == self.size - 1 and all(words["collective"] for words in words_of.values()):
            return None  # all ranks say that the collective failed: the network, or the user's own use of it
        return self._failed(words_of, self._alive)

    def _await_last_words(self) -> None:
        """Wait until the other ranks have said what happened to them, or one of them is the first cause. Notes the ranks that
        are alive by their heartbeat: some wait in a collective for ranks that wait here.
        """
        pulses = {rank: Pulse(self._board, rank) for rank in range(self.size) if rank != self.rank}
        until = monotonic() + LAST_WORDS_SECONDS
        while True:
            words_of = self._last_words()
            seconds = {rank: pulse.silent_seconds() for rank, pulse in pulses.items()}
            told = len(words_of) == self.size - 1 or any(not said["collective"] for said in words_of.values())
            began = {rank for rank in pulses if pulses[rank].began}
            self._alive = {rank for rank in began if seconds[rank] < 2 * board.BEAT_SECONDS}
            if told or monotonic() > until:
                self._gone |= set() if told else began - self._alive - set(words_of)
                return
            time.sleep(_POLL_SECONDS[1])

    def _last_words(self) -> dict[int, dict[str, Any]]:
        """What ended the other ranks, by rank."""
        for rank in range(self.size):
            text = self._board.read("error", rank) if rank != self.rank and rank not in self._words_of else None
            if text is not None:
                self._words_of[rank] = json.loads(text)
        return dict(self._words_of)

    def _failed(self, words_of: dict[int, dict[str, Any]], alive: Collection[int] = ()) -> RankFailedError:
        """The error that names the rank that failed first.

        Args:
            words_of: what ended the other ranks.
            alive: ranks whose process has not ended.
        """
        first = min(words_of, key=lambda rank: (words_of[rank]["collective"], words_of[rank]["order"]), default=None)
        silent = {rank for rank in range(self.size) if rank != self.rank and rank not in words_of}
        silent = silent.difference(alive) or silent
        if first is None or (silent and words_of[first]["collective"]):
            return RankFailedError(
                f"A collective failed, and rank {', '.join(str(self.names[rank]) for rank in sorted(silent))} did not say why: "
                "its process has ended (killed, or out of memory). Check its log, and run all ranks again."
            )
        if "relayed" in words_of[first]:
            return RankFailedError(words_of[first]["error"])
        return RankFailedError(
            f"Rank {self.names[first]} failed, so all ranks end: {words_of[first]['error']}. Fix that, and run all ranks again."
        )

    def leave(self) -> None:
        """This rank's run is over. The last rank to leave deletes what all have posted, so nothing is left in the store.
        It does not wait for ranks whose process has ended.
        """
        if self._left:
            return
        self._left = True
        self._heartbeat.stop()
        try:
            if self._board.count("left") + len(self._gone) >= self.size or self._alone:
                self._board.clear()
        except RuntimeError:  # the store is gone, with everything in it
            pass


def of_collective(error: BaseException) -> bool:
    """Whether an error comes from a collective that another rank did not take part in. Gloo's have no class of their own."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "Connection closed by peer", "NCCL"))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
