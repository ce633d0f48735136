"""Allocator events by the native counter: the peak of a block, what each op takes, and bytes that no op made.

A checkpoint's generator states, what compiled code saves for its backward: the recorder sees no op that makes them. Where the
counter has more alive than is known storage by storage, the difference is a tensor of its own, from the op where it was first
seen to the one before which it was gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightning_memopt.native import Counter, Window


class Unseen(NamedTuple):
    """Bytes that were in memory at the points `born_at .. freed_at`; None: to the end."""

    nbytes: int
    born_at: int
    freed_at: int | None


class Ledger:
    """What is known to be counted, storage by storage, against all that is counted.

    `settle` when everything is known that was there before the step, `note` before every op.
    """

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._known: dict[int, int] = {}
        self._known_nbytes = self._base_nbytes = 0
        self._open: list[Unseen] = []
        self._closed: list[Unseen] = []

    def born(self, key: int, storage: torch.UntypedStorage) -> None:
        """A storage is known under this key."""
        if key not in self._known and self.counter.counts(storage):
            self._known[key] = self.counter.nbytes(storage._cdata)
            self._known_nbytes += self._known[key]

    def died(self, key: int) -> None:
        self._known_nbytes -= self._known.pop(key, 0)

    @property
    def _difference_nbytes(self) -> int:
        return self.counter.plain_nbytes - self._known_nbytes - self._base_nbytes

    def settle(self) -> int:
        """Bytes that are held by what nobody knows; from now on they are no difference."""
        self._base_nbytes += self._difference_nbytes
        return self._base_nbytes

    def ran(self, now: int) -> None:
        """The op at the point `now` is over, and what it is known to have made is known: the rest of it is not."""
        change = self._difference_nbytes - sum(unseen.nbytes for unseen in self._open)
        if change > 0:
            self._open.append(Unseen(change, now, None))

    def note(self, now: int) -> None:
        """An op is about to run at the point after `now`."""
        self.ran(now + 1)
        change = self._difference_nbytes - sum(unseen.nbytes for unseen in self._open)
        while change < 0 and self._open:
            last = self._open.pop()
            gone = min(last.nbytes, -change)
            self._closed.append(Unseen(gone, last.born_at, now))
            if gone < last.nbytes:
                self._open.append(last._replace(nbytes=last.nbytes - gone))
            change += gone

    def unseen(self) -> Iterable[Unseen]:
        return (u for u in (*self._closed, *self._open) if u.freed_at is None or u.freed_at >= u.born_at)


class Marks:
    """Around every op: what it took beyond what it left. What rose between two ops is the first one's, too."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._index, self._began, self._left = -1, 0, 0
        self.workspaces: dict[int, int] = {}

    def __call__(self, index: int) -> Marks:
        self._since()
        self._index = index
        return self

    def __enter__(self) -> Marks:
        self._began = self._window.reset()
        return self

    def __exit__(self, *_: object) -> None:
        peak = self._window.peak_nbytes
        self._left = self._window.reset()
        self.workspaces[self._index] = max(0, peak - max(self._left, self._began))

    def _since(self) -> None:
        if self._index >= 0:
            rose = self._window.peak_nbytes - self._left
            self.workspaces[self._index] = max(self.workspaces.get(self._index, 0), rose)

    def close(self) -> None:
        self._since()
        self._window.close()
