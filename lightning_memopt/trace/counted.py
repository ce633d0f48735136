"""Measure with the native counter: the workspace of each op, and bytes that no recorded op allocated.

No recorded op allocates the generator states of a checkpoint, or the tensors that compiled code saves for its backward. If the
counter has more live bytes than the known storages, the difference becomes a tensor of its own. It lives from the op after
which it was first seen to the op before which it was freed. Bytes from before the step that are not tensors of the step
(another model, the previous step) are such a difference, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

import torch

from lightning_memopt.graph import BEFORE
from lightning_memopt.native import Counter, Window
from lightning_memopt.native.counting import PLAIN


class Unseen(NamedTuple):
    """Bytes that no recorded op allocated, or that are held longer than autograd holds them.

    nbytes: number of bytes.
    born_at: first point at which they are in memory; BEFORE if they were there before the step.
    freed_at: last such point; None: the end of the step.
    """

    nbytes: int
    born_at: int
    freed_at: int | None


class Ledger:
    """Compares the bytes of known storages with the live bytes of the native counter.

    Call `settle` when all storages from before the step are known, `note` before every op, and `ran` after it.

    base_nbytes: bytes of unknown storages that were in memory before the step and still are.
    open_nbytes: unseen bytes that were allocated since the step began and are still there.
    """

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._known: dict[int, int] = {}
        self._known_nbytes = self.base_nbytes = self.open_nbytes = self._settled = 0
        self._open: list[Unseen] = []
        self._closed: list[Unseen] = []

    def born(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Add a storage to the known ones, under a key. Returns whether its bytes are counted."""
        if not self.counter.adopt(storage._cdata):
            return False
        if key not in self._known:
            self._known[key] = self.counter.nbytes(storage._cdata)
            self._known_nbytes += self._known[key]
        return True

    def died(self, key: int) -> None:
        """Remove a storage that was freed from the known ones."""
        self._known_nbytes -= self._known.pop(key, 0)

    def left(self, key: int) -> None:
        """A known storage lives on without its memory."""
        if key in self._known:
            self._known_nbytes -= self._known[key]
            self._known[key] = 0

    def settle(self) -> None:
        """Count all bytes of unknown storages that are in memory now as from before the step."""
        self.base_nbytes = self.counter.live(PLAIN) - self._known_nbytes  # nothing has been allocated since the step began
        self._settled = self.counter.allocations()

    def is_older(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was in memory before the step, or is not counted."""
        return self.counter.number(storage._cdata) <= self._settled

    def is_counted(self, storage: torch.UntypedStorage) -> bool:
        """Whether the counter has counted a storage so far."""
        return self.counter.nbytes(storage._cdata) >= 0

    def identified(self, key: int, beyond_nbytes: int = 0) -> None:
        """A storage that `born` has added has become known only now: subtract it from the unknown bytes from before the step.
        `beyond_nbytes`: how many of its bytes may have been allocated since.
        """
        self.base_nbytes -= max(0, min(self.base_nbytes, self._known.get(key, 0) - beyond_nbytes))

    def taken(self, nbytes: int, points: Container[int]) -> int | None:
        """A storage of `nbytes` has become known only now: subtract it from the unseen bytes if at least as many were allocated
        at one of these points. Returns the latest such point, or None.
        """
        for i, unseen in reversed(list(enumerate(self._open))):
            if unseen.born_at in points and 0 < nbytes <= unseen.nbytes:
                self._open[i] = unseen._replace(nbytes=unseen.nbytes - nbytes)
                self.open_nbytes -= nbytes
                return unseen.born_at
        return None

    def ran(self, now: int) -> None:
        """The op at the point `now` has ended, and its known outputs were added. Other new bytes are unseen ones."""
        change = self.counter.live(PLAIN) - self._known_nbytes - self.base_nbytes - self.open_nbytes
        if change > 0:
            self._opens(change, now)

    def _opens(self, nbytes: int, at: int) -> None:
        self._open.append(Unseen(nbytes, at, None))
        self.open_nbytes += nbytes

    def note(self, now: int) -> None:
        """An op is about to run at the point after `now`: find unseen bytes that were allocated or freed since the last op."""
        change = self.counter.live(PLAIN) - self._known_nbytes - self.base_nbytes - self.open_nbytes
        if change > 0:
            self._opens(change, now + 1)
        if change >= 0:
            return
        change += self.end(-change, now)
        if change < 0 and self.base_nbytes > 0:
            freed_nbytes = min(self.base_nbytes, -change)
            self._closed.append(Unseen(freed_nbytes, BEFORE, now))
            self.base_nbytes -= freed_nbytes

    def end(self, nbytes: int, now: int) -> int:
        """`nbytes` of the unseen bytes end at the point `now`, because they are freed, or belong to a storage that has become
        known. Returns how many of them there were.
        """
        left = nbytes
        while left and self._open:
            newest = self._open.pop()
            part = min(newest.nbytes, left)
            self._closed.append(Unseen(part, newest.born_at, now))
            if part < newest.nbytes:
                self._open.append(newest._replace(nbytes=newest.nbytes - part))
            left -= part
        self.open_nbytes -= nbytes - left
        return nbytes - left

    def unseen(self) -> Iterable[Unseen]:
        """The bytes that no recorded op allocated."""
        base = Unseen(self.base_nbytes, BEFORE, None)
        return [u for u in (base, *self._closed, *self._open) if u.nbytes and (u.freed_at is None or u.freed_at >= u.born_at)]


class Marks:
    """Measures the workspace of each op, between `begins` and `ends`: its peak bytes minus the bytes that are left after it.

    A rise between two ops counts as workspace of the first one. `workspaces`: index of an op -> bytes.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._peak, self._reset, self._of_window = window.functions  # called for every op
        self._index, self._began, self._left = -1, 0, 0
        self._frees = False
        self.workspaces: dict[int, int] = {}

    def begins(self, index: int, frees: bool = False) -> None:
        """The op `index` is about to run. `frees`: bytes that it frees do not count as in memory at its point."""
        rose = self._peak(*self._of_window) - self._left
        if rose > self.workspaces.get(self._index, 0) and self._index >= 0:
            self.workspaces[self._index] = rose
        self._index, self._frees = index, frees
        self._began = self._reset(*self._of_window)

    def ends(self) -> None:
        peak = self._peak(*self._of_window)
        self._left = self._reset(*self._of_window)
        self.workspaces[self._index] = max(0, peak - (self._left if self._frees else max(self._left, self._began)))

    def _count_rise(self) -> None:
        """Add the rise since the last op ended to its workspace."""
        if self._index >= 0:
            rose = self._peak(*self._of_window) - self._left
            self.workspaces[self._index] = max(self.workspaces.get(self._index, 0), rose)

    def close(self) -> None:
        self._count_rise()
        self._window.close()
