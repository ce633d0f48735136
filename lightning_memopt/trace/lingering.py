"""Saved tensors that stay in memory after autograd released them.

Compiled code takes all tensors that its forward saved when its backward begins, and holds them until that ends. They stay in
memory for that time whether a plan keeps or rebuilds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from lightning_memopt.record import Slot
from lightning_memopt.trace.counted import Unseen


class Lingering:
    """Tracks the saved slots of one step from their last release until nobody holds their memory."""

    def __init__(self) -> None:
        self._saves: Counter[int] = Counter()
        self._slots: dict[int, Slot] = {}
        self._since: dict[int, int] = {}
        self._freed: list[Unseen] = []

    def packed(self, slot: Slot) -> None:
        """Autograd saves a slot; it may save the same slot several times."""
        self._saves[slot.id] += 1
        self._slots[slot.id] = slot

    def released(self, id: int, now: int, by_user: bool) -> None:
        """Autograd releases one save of a slot at the point `now`. `by_user`: user code holds it; then it is not tracked."""
        self._saves[id] -= 1
        if self._saves[id] == 0 and not by_user:
            self._since[id] = now + 1

    def poll(self, now: int, held: Callable[[Slot], bool]) -> None:
        """Find slots whose memory was freed. `held(slot)`: whether anything but the engine holds it."""
        for id, born_at in list(self._since.items()):
            slot = self._slots[id]
            if not held(slot):
                del self._since[id]
                if born_at <= now:
                    self._freed.append(Unseen(slot.nbytes, born_at, now))

    def seen(self) -> Iterator[Unseen]:
        """The held bytes, each from the point after its release on."""
        yield from self._freed
        yield from (Unseen(self._slots[id].nbytes, born_at, None) for id, born_at in self._since.items())

    def close(self) -> None:
        self._slots.clear()
        self._since.clear()
