"""What is held after autograd has let go of it: compiled code takes all that its forward saved when its backward begins, and
keeps it until that ends. Whether a plan kept it or made it again, it is there for as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from lightning_memopt.record import StorageVersion
from lightning_memopt.trace.counted import Unseen


class Lingering:
    """Of one step."""

    def __init__(self) -> None:
        self._saves: Counter[int] = Counter()
        self._versions: dict[int, StorageVersion] = {}
        self._since: dict[int, int] = {}
        self._gone: list[Unseen] = []

    def packed(self, version: StorageVersion) -> None:
        """Autograd saves a version, perhaps once more."""
        self._saves[version.id] += 1
        self._versions[version.id] = version

    def released(self, id: int, now: int, by_user: bool) -> None:
        """Autograd lets go of one of its saves at the point `now`. `by_user`: the user still holds it, which others know."""
        self._saves[id] -= 1
        if self._saves[id] == 0 and not by_user:
            self._since[id] = now + 1

    def poll(self, now: int, held: Callable[[StorageVersion], bool]) -> None:
        """`held(version)`: whether anybody but the engine holds its memory."""
        for id, born_at in list(self._since.items()):
            version = self._versions[id]
            if not held(version):
                del self._since[id]
                if born_at <= now:
                    self._gone.append(Unseen(version.nbytes, born_at, now))

    def seen(self) -> Iterator[Unseen]:
        """What was held, from the point after its release on."""
        yield from self._gone
        yield from (Unseen(self._versions[id].nbytes, born_at, None) for id, born_at in self._since.items())

    def close(self) -> None:
        self._versions.clear()
        self._since.clear()
