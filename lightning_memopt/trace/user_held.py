"""Find storages that only the engine still holds, because user code has released them, by their use counts.

There is no event for this, because the engine's own alias keeps such a storage alive. So before every op all use counts are
read, which takes time in proportion to the number of tensors that user code holds at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_memopt.native.engine import loaded
from lightning_memopt.record import OWN_COUNT, StorageVersion, storage_id
from lightning_memopt.torch_private import storage_use_count

ALONE = OWN_COUNT + 1
"""The use count of a storage that only one tensor, the engine's, holds."""


class UserHeld:
    """The versions of one forward that user code holds, and all versions on their storages.

    alone: the watched versions that are the only ones on their storages, by id.
    together: the other watched versions, each with all versions on its storage, by id.
    lonely: `lonely(alone, ALONE)` gives the ids of those of `alone` that only the engine still holds.
    """

    def __init__(self) -> None:
        native = loaded()
        self.lonely: Callable[[dict[int, StorageVersion], int], list[int]] = _lonely if native is None else native.lonely
        self._first: dict[int, StorageVersion] = {}
        self._all: dict[int, list[StorageVersion]] = {}
        """For each storage: its first version, and a list of all its versions if there are several."""
        self.alone: dict[int, StorageVersion] = {}
        self.together: dict[int, tuple[StorageVersion, list[StorageVersion]]] = {}

    def born(self, version: StorageVersion, storage: int, watched: bool) -> None:
        """Add a version of the storage with this id. `watched`: watch until it is released."""
        first = self._first.setdefault(storage, version)
        if first is version:
            if watched:
                self.alone[version.id] = version
            return
        versions = self._all.setdefault(storage, [first])
        versions.append(version)
        if watched:
            self.together[version.id] = version, versions
        if self.alone.pop(first.id, None) is not None:
            self.together[first.id] = first, versions

    def forget(self, ids: Iterable[int]) -> None:
        """Stop watching these versions."""
        for id in ids:
            if self.alone.pop(id, None) is None:
                self.together.pop(id, None)

    def handed_over(self, version: StorageVersion, storage: int) -> None:
        """Another version of the storage replaces this one; the engine may hold both."""
        self.forget((version.id,))
        if version.holding.value is None and storage not in self._all:
            self._first.pop(storage, None)

    def released(self) -> list[int]:
        """Ids of the watched versions that only the engine still holds. Stops watching them."""
        ids = self.lonely(self.alone, ALONE)
        if self.together:
            # a copy: the garbage collector may run in the loop and free storages
            pairs = tuple(self.together.values())
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
        self.alone.clear()
        self.together.clear()


def _lonely(versions: dict[int, StorageVersion], alone: int) -> list[int]:
    # a copy: the garbage collector may run in the loop and free storages
    return [v.id for v in tuple(versions.values()) if v.holding.value is not None and storage_use_count(v.weak) <= alone]


def _is_held(version: StorageVersion, on_storage: list[StorageVersion]) -> bool:
    """Whether anything other than the engine holds a version's memory. The engine may hold several versions on a storage."""
    value = version.holding.value
    if value is None:
        return version.alive() is not None
    values = [v.holding.value for v in on_storage if v.holding.value is not None]
    held = 1 if len(values) == 1 else [storage_id(v) for v in values].count(storage_id(value))
    return storage_use_count(version.weak) > held + OWN_COUNT
