"""Saved tensors that stay in memory after autograd released them.

When its backward begins, compiled code takes all tensors that its forward saved, and holds them until that backward ends. They
stay in memory for that time whether a plan keeps or rebuilds them. Tensors that are freed before another op runs do not count:
a dropped autograd graph releases all its saves one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from lightning_memopt.record import StorageVersion
from lightning_memopt.trace.counted import Unseen


class Lingering:
    """Tracks the saved versions of one step from their last release until nothing holds their memory.

    since: id of a tracked version -> (the first point after its last release, number of ops that had run then).
    """

    def __init__(self) -> None:
        self._saves: Counter[int] = Counter()
        self._versions: dict[int, StorageVersion] = {}
        self.since: dict[int, tuple[int, int]] = {}
        self._freed: list[Unseen] = []

    def packed(self, version: StorageVersion) -> None:
        """Autograd saves a version; it may save the same version several times."""
        self._saves[version.id] += 1
        self._versions[version.id] = version

    def released(self, id: int, now: int, ops: int, by_user: bool) -> None:
        """Autograd releases one save of a version at the point `now`, after `ops` ops. `by_user`: user code holds the version,
        so it is not tracked.
        """
        self._saves[id] -= 1
        if self._saves[id] == 0 and not by_user:
            self.since[id] = now + 1, ops

    def poll(self, now: int, ops: int, held: Callable[[StorageVersion], bool]) -> None:
        """Find versions whose memory was freed. `ops`: number of ops so far. `held(version)`: whether anything else holds
        it.
        """
        for id, (born_at, before) in list(self.since.items()):
            version = self._versions[id]
            if not held(version):
                del self.since[id]
                if ops > before:
                    self._freed.append(Unseen(version.nbytes, born_at, now))

    def seen(self) -> Iterator[Unseen]:
        """The held bytes, each from the point after its release."""
        yield from self._freed
        yield from (Unseen(self._versions[id].nbytes, born_at, None) for id, (born_at, _) in self.since.items())

    def close(self) -> None:
        self._versions.clear()
        self.since.clear()
