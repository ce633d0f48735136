"""Storages that only the engine still holds, because user code released them: found by their use counts.

No event tells it: the engine's own alias keeps such a storage alive. So all of them are asked before every op, and the cost of
that is the number of tensors that user code holds at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.native.engine import loaded
from lightning_memopt.record import OWN_COUNT, StorageVersion, storage_id
from lightning_memopt.torch_private import storage_use_count

_ALONE = OWN_COUNT + 1
"""The use count of a storage that one tensor of the engine holds alone."""


class Holders:
    """The versions of one forward that user code holds, and all versions on their storages."""

    def __init__(self) -> None:
        self._native = loaded()
        self._first: dict[int, StorageVersion] = {}
        self._all: dict[int, list[StorageVersion]] = {}
        """Of each storage: the first version, and a list of all versions where there are several."""
        self._alone: dict[int, StorageVersion] = {}
        """The watched versions that are the only ones on their storages, by id; the others are in `_together`."""
        self._together: dict[int, tuple[StorageVersion, list[StorageVersion]]] = {}

    def born(self, version: StorageVersion, storage: int, watched: bool) -> None:
        """Add a version of the storage with this id. `watched`: watch until it is released."""
        first = self._first.setdefault(storage, version)
        if first is version:
            if watched:
                self._alone[version.id] = version
            return
        versions = self._all.setdefault(storage, [first])
        versions.append(version)
        if watched:
            self._together[version.id] = version, versions
        if self._alone.pop(first.id, None) is not None:
            self._together[first.id] = first, versions

    def forget(self, ids: Iterable[int]) -> None:
        """Watch these versions no longer."""
        for id in ids:
            if self._alone.pop(id, None) is None:
                self._together.pop(id, None)

    def handed_over(self, version: StorageVersion, storage: int) -> None:
        """Another version on the storage comes in place of this one: what the engine holds of both counts."""
        self.forget((version.id,))
        if version.holding.value is None and storage not in self._all:
            self._first.pop(storage, None)

    def released(self) -> list[int]:
        """Ids of the watched versions that only the engine holds; they are watched no longer."""
        native, ids = self._native, list[int]()
        # copies: the garbage collector may run in the loops and free storages
        if native is not None:
            ids = native.lonely(self._alone, _ALONE)
        else:
            for version in tuple(self._alone.values()):
                if version.holding.value is not None and storage_use_count(version.weak) <= _ALONE:
                    ids.append(version.id)
        if self._together:
            pairs = tuple(self._together.values())
            ids += [v.id for v, others in pairs if v.holding.value is not None and not _is_held(v, others)]
        if ids:
            self.forget(ids)
        return ids

    def hold(self, version: StorageVersion, storage: int) -> bool:
        """Whether anything but the engine holds the memory of a version."""
        return _is_held(version, self._all.get(storage) or [self._first[storage]])

    def clear(self) -> None:
        self._first.clear()
        self._all.clear()
        self._alone.clear()
        self._together.clear()


def _is_held(version: StorageVersion, on_storage: list[StorageVersion]) -> bool:
    """Whether anything but the engine, which may hold other versions on the same storage, too, holds a version's memory."""
    value = version.holding.value
    if value is None:
        return version.alive() is not None
    values = [v.holding.value for v in on_storage if v.holding.value is not None]
    held = 1 if len(values) == 1 else [storage_id(v) for v in values].count(storage_id(value))
    return storage_use_count(version.weak) > held + OWN_COUNT
