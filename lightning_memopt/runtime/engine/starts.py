"""Writes, after the forward, to memory that the forward read: the user scales the input in place, or the next forward updates a
buffer (R5). Autograd allows this if it saved other tensors, or if no version counter moves (`.data`).

Such writes are seen while a step is observed. Rebuilds in this step start from a copy of the old bytes. A plan has no such
copies. So that nothing autograd still holds is rebuilt from overwritten bytes, some ops are `lost` and never run again:

- Before backward, while most of the forward is held: the ops that read the bytes. Their results stay, and all else is rebuilt
  from these.
- Later, at the update: the ops that made what is still held (a part of the loss that had no backward). It stays, and until
  the update the ops before it may run again for other tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_memopt.record import Tape, storage_id
from lightning_memopt.runtime.engine.holding import Holding, Version


class Starts:
    """The versions, by their memory, from which rebuilds may start after one forward, or which autograd reads.

    lost: numbers of the ops that cannot run again in a planned step.
    """

    def __init__(self, tape: Tape[Holding]) -> None:
        self._tape = tape
        self.on: dict[int, list[Version]] = {}
        self._saved: list[Version] = []
        self._saved_nbytes = 0  # when the forward ended
        self._made_from: tuple[int, dict[int, list[int]]] = 0, {}
        """(number of saved versions, id -> the versions that a rebuild from it makes): valid for that number."""
        self._readers: tuple[int, dict[int, set[int]]] = 0, {}
        """(number of versions on the tape, id -> the ops that read it): valid for that number."""
        self.lost: set[int] = set()

    def note(self) -> None:
        """The forward, or a call of it, is over, and later writes are not part of it. From now on, until the next call of the
        model in this forward, no op is recorded, and no handle is made.
        """
        self.on.clear()
        self._made_from = 0, {}
        self._saved = [version for version in self._tape.versions.values() if version.holding.handles > 0]
        self._saved_nbytes = _nbytes_of(self._saved)
        for version in self._tape.versions.values():
            holding = version.holding
            if holding.value is not None and (version.read or holding.handles > 0):
                self.on.setdefault(storage_id(holding.value), []).append(version)
            elif holding.handles > 0 and not version.stale:
                self.on.setdefault(version.weak, []).append(version)  # evicted; the user may still hold its memory

    def has(self, version: Version | None) -> bool:
        """Whether a version is among these versions."""
        return version is not None and any(version is v for v in self.on.get(version.weak, ()))

    def taken(self, t: torch.Tensor) -> Iterator[Version]:
        """The memory of `t` is about to be written: yields the versions on it whose bytes backward may still need. Each is
        yielded once, and the caller drops or copies it.
        """
        versions = self.on.get(storage_id(t))
        if versions is None:
            return
        wanting = [self._wanting(version) for version in versions]
        if not any(wanting) and not any([version.holding.handles > 0 for version in versions]):
            return
        del self.on[storage_id(t)]
        few = 2 * _nbytes_of(self._saved) < self._saved_nbytes
        for version, saved in zip(versions, wanting, strict=True):
            self._lose(version, {v.call.op for v in saved if v.call is not None} if few else self._reading(version, saved))
            yield version

    def changed_unseen(self) -> None:
        """A rebuild was impossible: lose all versions that have changed since the forward."""
        for versions in self.on.values():
            for version in versions:
                if not version.holding.intact:
                    self.lose(version)

    def lose(self, version: Version) -> None:
        """The version's bytes will have changed when a planned step would rebuild from them: mark ops as lost."""
        count, readers = self._readers
        if count != len(self._tape.versions):
            count, readers = self._readers = len(self._tape.versions), self._read_by()
        self._lose(version, readers.get(version.id, set()))

    def _lose(self, version: Version, ops: set[int]) -> None:
        """`ops`: those that must not run again."""
        self.lost |= ops
        if version.call is not None and version.holding.handles > 0:
            self.lost.add(version.call.op)

    def _read_by(self) -> dict[int, set[int]]:
        """Id of a version -> the recorded ops that read it."""
        readers: dict[int, set[int]] = {}
        for version in self._tape.versions.values():
            if version.call is not None:
                for id in version.call.reads:
                    readers.setdefault(id, set()).add(version.call.op)
        return readers

    def _wanting(self, start: Version) -> list[Version]:
        """The versions that autograd still holds and that might be rebuilt from the version, if other versions were dropped."""
        self._saved = [version for version in self._saved if version.holding.handles > 0]  # autograd releases saves over time
        if not self._saved:
            return []
        count, made_from = self._made_from
        if count != len(self._saved):
            made_from = {}
            for version in self._before(self._saved):
                for id in _needs(version):
                    made_from.setdefault(id, []).append(version.id)
            self._made_from = len(self._saved), made_from
        waiting, reached = [start.id], set[int]()
        while waiting:
            for id in made_from.get(waiting.pop(), ()):
                if id not in reached:
                    reached.add(id)
                    waiting.append(id)
        return [version for version in self._saved if version.id in reached]

    def _reading(self, start: Version, saved: list[Version]) -> set[int]:
        """The ops that read the version and by which the `saved` versions could be rebuilt."""
        calls = (version.call for version in self._before(saved))
        return {call.op for call in calls if call is not None and start.id in call.reads}

    def _before(self, targets: list[Version]) -> list[Version]:
        """The targets, and all versions from which they could be rebuilt."""
        found, seen = list(targets), {version.id for version in targets}
        for version in found:
            for id in _needs(version):
                if id not in seen:
                    seen.add(id)
                    found.append(self._tape.versions[id])
        return found


def _needs(version: Version) -> tuple[int, ...]:
    """The versions that a rebuild of this one reads."""
    reads = version.call.reads if version.call is not None else ()
    return reads if version.next is None else (*reads, version.next)


def _nbytes_of(versions: list[Version]) -> int:
    return sum(version.nbytes for version in versions)
