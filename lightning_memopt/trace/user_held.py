"""Find storages that only the engine still holds, because user code has released them, by their use counts.

There is no event for this, because the engine's own alias keeps such a storage alive. So before every op all use counts are
read, which takes time in proportion to the number of tensors that user code holds at that time.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.native.engine import loaded
from lightning_memopt.record import OWN_COUNT, StorageVersion, storage_id
from lightning_memopt.torch_private import storage_use_count

_ALONE = OWN_COUNT + 1
"""The use count of a storage that only one tensor, the engine's, holds."""


class UserHeld:
    """The versions of one forward that user code holds, and all versions on their storages."""

    def __init__(self) -> None:
        self._native = loaded()
        self._first: dict[int, StorageVersion] = {}
        self._all: dict[int, list[StorageVersion]] = {}
        """For each storage: its first version, and a list of all its versions if there are several."""
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
        """Stop watching these versions."""
        for id in ids:
            if self._alone.pop(id, None) is None:
                self._together.pop(id, None)

    def handed_over(self, version: StorageVersion, storage: int) -> None:
        """Another version of the storage replaces this one; the engine may hold both."""
        self.forget((version.id,))
        if version.holding.value is None and storage not in self._all:
            self._first.pop(storage, None)

    def released(self) -> list[int]:
        """Ids of the watched versions that only the engine still holds. Stops watching them."""
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

    def is_held(self, version: StorageVersion, storage: int) -> bool:
        """Whether anything other than the engine holds the memory of a version."""
        return _is_held(version, self._all.get(storage) or [self._first[storage]])

    def clear(self) -> None:
        self._first.clear()
        self._all.clear()
        self._alone.clear()
        self._together.clear()


def _is_held(version: StorageVersion, on_storage: list[StorageVersion]) -> bool:
    """Whether anything other than the engine holds a version's memory. The engine may hold several versions on a storage."""
    value = version.holding.value
    if value is None:
        return version.alive() is not None
    values = [v.holding.value for v in on_storage if v.holding.value is not None]
    held = 1 if len(values) == 1 else [storage_id(v) for v in values].count(storage_id(value))
    return storage_use_count(version.weak) > held + OWN_COUNT
