"""The surplus: what an observing engine holds although a plain step would not. These are bytes from which rebuilds could start,
and that neither the user nor autograd holds any more. If they are more than a few percent of the step, the engine lets go of
them, and nothing is rebuilt from them in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from lightning_memopt.record import OWN_COUNT, Call, Origin, Tape, storage_id
from lightning_memopt.runtime.engine.holding import Claim, Holding, Version, rebuildable
from lightning_memopt.torch_private import storage_use_count

BEYOND_PLAIN = 0.08
"""Maximum bytes that an observed step takes in addition to those of the plain step, as a share of the plain step's peak so
far.
"""
_SOURCES = 64
"""Maximum number of versions that are visited to find the starts from which one is rebuilt."""
_EXTERNAL = Origin.EXTERNAL


class Bound:
    """How many bytes an observed step may take.

    live: returns the bytes that are in memory.
    unrebuilt: returns the bytes in memory, without those that were made by rebuilds or are copies for rebuilds.
    limit_nbytes: the limit of the step; None: only what a plain step takes limits it.
    plain_peak_nbytes: what a plain step has taken so far, as far as it was looked at.
    """

    def __init__(self, live: Callable[[], int], unrebuilt: Callable[[], int], limit_nbytes: int | None) -> None:
        self._live = live
        self.unrebuilt = unrebuilt
        self._limit_nbytes = limit_nbytes
        self.plain_peak_nbytes = 0

    def spare(self, surplus_nbytes: int) -> int:
        """Bytes that may be in memory in addition to those of the plain step. `surplus_nbytes`: the surplus that the forward
        made and that is in memory now.
        """
        self.plain_peak_nbytes = max(self.plain_peak_nbytes, self.unrebuilt() - surplus_nbytes)
        return int(BEYOND_PLAIN * self.plain_peak_nbytes)

    def room(self, surplus_nbytes: int, stay: bool = False) -> int:
        """Bytes that may be taken, for a moment, in addition to those in memory. `stay`: they are to stay, for which a limit
        far above the plain step gives no room.
        """
        plain = self.spare(surplus_nbytes) + self.plain_peak_nbytes
        limit = 0 if self._limit_nbytes is None or (stay and not self.is_tight) else self._limit_nbytes
        return max(plain, limit) - self._live()

    @property
    def is_tight(self) -> bool:
        """Whether the step may have to evict tensors."""
        return self._limit_nbytes is not None and self._limit_nbytes < 2 * self.plain_peak_nbytes


class Alone(NamedTuple):
    """Bytes that only the engine holds, and how many of them the forward made (the others are copies)."""

    nbytes: int
    made: int


class Pace:
    """Decides when the surplus is counted (this visits all starts) and searched for bytes to let go of (this visits the whole
    tape): after enough ops to be worth the time, or as soon as there are clearly more bytes.
    """

    _VISITED_FOR_AN_OP = 16
    """Maximum number of starts and versions that are visited per op, on average."""
    _COUNT = 64
    """What a count takes beside its visits, as a number of visits."""
    _VISITED_AT_ONCE, _MOST_OPS_APART = 256, 64
    """While the surplus may grow with every op, the tape is searched every n ops: n is the number of its versions divided by
    the first number, but at most the second.
    """

    def __init__(self) -> None:
        self._counts_in = 0
        self._counts_above_nbytes = 0
        self._ops_since_look = 0

    def is_due(self, most_nbytes: int, versions: int) -> bool:
        """Whether to count after this op. `most_nbytes`: upper bound of the surplus; `versions`: how many are on the tape."""
        self._counts_in -= 1
        self._ops_since_look += 1
        if self._counts_in > 0 and most_nbytes <= self._counts_above_nbytes:
            return False
        return self._ops_since_look >= min(self._MOST_OPS_APART, versions // self._VISITED_AT_ONCE)

    def counted(self, starts: int, above_nbytes: int) -> None:
        """The surplus was counted. The next count comes later, or when there may be more than `above_nbytes`."""
        self._counts_in = (self._COUNT + starts) // self._VISITED_FOR_AN_OP
        self._counts_above_nbytes = above_nbytes

    def looked(self, found: bool, versions: int) -> None:
        """The tape was searched. `found`: whether there was enough to let go of."""
        self._ops_since_look = 0
        if not found:
            self._counts_in = max(self._MOST_OPS_APART, versions // self._VISITED_FOR_AN_OP)


class Surplus:
    """The starts that an engine holds in one forward, and the calls that read each version.

    most_nbytes: upper bound of the surplus: bytes of all starts, even if others hold them, or they were freed since `alone`.
    """

    def __init__(self, tape: Tape[Holding]) -> None:
        self._tape = tape
        self.most_nbytes = 0
        self._starts: dict[int, Version] = {}
        self._readers: dict[int, list[Call]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def recorded(self, call: Call) -> None:
        """A call that may run again was recorded."""
        for id in call.reads:
            self._readers.setdefault(id, []).append(call)

    def holds(self, version: Version) -> None:
        """The engine holds the bytes of a version that no call makes."""
        if version.id not in self._starts:
            self._starts[version.id] = version
            self.most_nbytes += version.nbytes

    def alone(self) -> list[Version]:
        """The versions that only the engine holds. Autograd holds what it has saved."""
        return [version for _, versions in self._alone() for version in versions]

    def _alone(self) -> list[tuple[int, list[Version]]]:
        """(storage, the starts on it) of those that only the engine holds. It runs for many ops of an observed step."""
        starts = dict[int, Version]()
        on = dict[int, list[Version]]()
        most_nbytes = 0
        for id, version in self._starts.items():
            value = version.holding.value
            if value is not None:
                starts[id] = version
                most_nbytes += version.nbytes
                on.setdefault(storage_id(value), []).append(version)
        self._starts, self.most_nbytes = starts, most_nbytes
        alone = []
        for storage, versions in on.items():
            if storage_use_count(storage) <= OWN_COUNT + len(versions):
                for version in versions:
                    if version.holding.handles:
                        break
                else:
                    alone.append((storage, versions))
        return alone

    def nbytes(self) -> Alone:
        """Bytes of the storages that only the engine holds."""
        nbytes = made_nbytes = 0
        for storage, versions in self._alone():
            nbytes += versions[-1].nbytes
            if storage == versions[-1].weak:
                made_nbytes += versions[-1].nbytes
        return Alone(nbytes, made_nbytes)

    def needed(self) -> set[int]:
        """Ids of the versions from which a tensor that autograd saved, and that is not in memory, must be rebuilt."""
        versions, needed = self._tape.versions, set[int]()
        waiting = [version for version in versions.values() if version.holding.handles > 0]
        seen = {version.id for version in waiting}
        while waiting:
            version = waiting.pop()
            if version.holding.value is not None and version.next is None:
                continue
            reads = version.call.reads if version.call is not None and version.holding.value is None else ()
            for id in (*reads, *(() if version.next is None else (version.next,))):
                needed.add(id)
                if id not in seen:
                    seen.add(id)
                    waiting.append(versions[id])
        return needed

    def droppable(self, evictable: Collection[int]) -> list[Version]:
        """The versions that the engine may let go of, the largest first: no evicted tensor needs them, and without them the
        tensors that can no longer be evicted have no more bytes than they. `evictable`: ids of versions that may be evicted.
        """
        needed = self.needed()
        free = [v for v in self.alone() if v.id not in needed and v.holding.claim is not Claim.PINNED]
        return sorted((v for v in free if not evictable or self._costs_no_more(v, evictable)), key=lambda v: -v.nbytes)

    def gives_back(self, version: Version, evictable: Collection[int]) -> bool:
        """Whether an eviction of the version frees bytes. It does not if its rebuild needs a start that the engine could
        otherwise let go of, and that has as many bytes as all that is rebuilt from it.
        """
        versions = self._tape.versions
        waiting = [version]
        seen = {version.id}
        while waiting and len(seen) < _SOURCES:
            call = waiting.pop().call
            for id in () if call is None else call.reads:
                if id in seen:
                    continue
                seen.add(id)
                source = versions[id]
                if source.holding.value is None:
                    waiting.append(source)
                    continue
                may_go = id in self._starts and source.origin is not _EXTERNAL and not source.holding.handles
                if may_go and self._costs_no_more(source, evictable):
                    return False
        return True

    def _costs_no_more(self, start: Version, evictable: Collection[int]) -> bool:
        """Whether the evictable versions that are rebuilt from a start have at most as many bytes as the start."""
        versions = self._tape.versions
        nbytes = 0
        waiting = [start.id]
        seen = {start.id}
        while waiting:
            for call in self._readers.get(waiting.pop(), ()):
                for id in {id for _, id in (*call.made, *call.mutates)} - seen:
                    seen.add(id)
                    waiting.append(id)
                    nbytes += versions[id].nbytes if id in evictable else 0
                    if nbytes > start.nbytes:
                        return False
        return True

    def lose(self, version: Version) -> list[Version]:
        """Let go of the bytes of a version. Returns the versions that cannot be rebuilt any more."""
        self._starts.pop(version.id, None)
        version.holding.drop()
        version.holding.reachable = False
        versions = self._tape.versions
        lost: list[Version] = []
        waiting = [version]
        while waiting:
            for call in self._readers.get(waiting.pop().id, ()):
                made = (versions[id] for _, id in (*call.made, *call.mutates))
                for dependent in made:
                    if rebuildable(dependent):
                        dependent.holding.reachable = False
                        lost.append(dependent)
                        if dependent.holding.value is None:
                            waiting.append(dependent)
        return lost
