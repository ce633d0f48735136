"""What an observing engine holds beyond what a plain step would: bytes from which rebuilds could start, and that neither the
user nor autograd holds any more. They are let go where they are more than a few percent of the step; then nothing is rebuilt
from them in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from lightning_memopt.record import OWN_COUNT, Call, Origin, Tape, storage_id
from lightning_memopt.runtime.engine.holding import Claim, Holding, Version, rebuildable
from lightning_memopt.torch_private import storage_use_count

_BEYOND_PLAIN = 0.08
"""The most that an observed step takes beyond what the plain step has taken until then, as a share of that."""
_SOURCES = 64
"""Maximum number of versions that are looked at to see from which starts one is rebuilt."""
_EXTERNAL = Origin.EXTERNAL


class Bound:
    """How much an observed step may take.

    live: returns the bytes that are in memory.
    unrebuilt: returns those of them that neither rebuilds nor their preparation, copies, have made.
    limit_nbytes: the limit of the step; None: it has none, but for what a plain step takes.
    """

    def __init__(self, live: Callable[[], int], unrebuilt: Callable[[], int], limit_nbytes: int | None) -> None:
        self._live = live
        self._unrebuilt = unrebuilt
        self._limit_nbytes = limit_nbytes
        self._plain_peak_nbytes = 0

    def spare(self, surplus_nbytes: int) -> int:
        """Bytes that may be in memory beyond those of the plain step. `surplus_nbytes`: those that the forward made, and that
        are in memory now.
        """
        self._plain_peak_nbytes = max(self._plain_peak_nbytes, self._unrebuilt() - surplus_nbytes)
        return int(_BEYOND_PLAIN * self._plain_peak_nbytes)

    def room(self, surplus_nbytes: int, stay: bool = False) -> int:
        """Bytes that may be taken beyond those that are in memory, for a moment. `stay`: they stay; a limit far above the plain
        step gives them no room.
        """
        plain = self.spare(surplus_nbytes) + self._plain_peak_nbytes
        limit = 0 if self._limit_nbytes is None or (stay and not self.is_tight) else self._limit_nbytes
        return max(plain, limit) - self._live()

    @property
    def is_tight(self) -> bool:
        """Whether the step may have to evict tensors."""
        return self._limit_nbytes is not None and self._limit_nbytes < 2 * self._plain_peak_nbytes


class Alone(NamedTuple):
    """Bytes that only the engine holds, and those of them that the forward has made: the others are copies."""

    nbytes: int
    made: int


class Pace:
    """When the surplus is counted, which visits all starts, and looked through, which visits the whole tape: after as many ops
    as that is worth, or as soon as there are clearly more bytes.
    """

    _VISITED_FOR_AN_OP = 16
    """Most starts and versions that are visited for an op, in the mean."""
    _VISITED_AT_ONCE, _MOST_OPS_APART = 256, 64
    """Where bytes come with every op, the tape is looked through after one op for so many versions, and after the most ops in
    any case."""

    def __init__(self) -> None:
        self._counts_in = 0
        self._counts_above_nbytes = 0
        self._ops_since_look = 0

    def is_due(self, most_nbytes: int, versions: int) -> bool:
        """Whether an op is followed by a count. `most_nbytes`: the most that there may be; `versions`: on the tape."""
        self._counts_in -= 1
        self._ops_since_look += 1
        if self._counts_in > 0 and most_nbytes <= self._counts_above_nbytes:
            return False
        return self._ops_since_look >= min(self._MOST_OPS_APART, versions // self._VISITED_AT_ONCE)

    def counted(self, starts: int, above_nbytes: int) -> None:
        """The next count comes later, or where there may be more than `above_nbytes`."""
        self._counts_in = starts // self._VISITED_FOR_AN_OP
        self._counts_above_nbytes = above_nbytes

    def looked(self, found: bool, versions: int) -> None:
        """The tape was looked through; `found`: there was enough to let go of."""
        self._ops_since_look = 0
        if not found:
            self._counts_in = max(self._MOST_OPS_APART, versions // self._VISITED_FOR_AN_OP)


class Surplus:
    """The starts that an engine holds in one forward, and the calls that read each version.

    most_nbytes: bytes of the starts, whoever else holds them; those that went away count until `alone` is asked.
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
        """The versions that nobody but the engine holds. What autograd has saved counts as held by it."""
        self._starts = {id: version for id, version in self._starts.items() if version.holding.value is not None}
        self.most_nbytes = sum([version.nbytes for version in self._starts.values()])
        on: dict[int, list[Version]] = {}
        for version in self._starts.values():
            if version.holding.value is not None:
                on.setdefault(storage_id(version.holding.value), []).append(version)
        return [
            version
            for storage, versions in on.items()
            if storage_use_count(storage) <= OWN_COUNT + len(versions) and not any(v.holding.handles for v in versions)
            for version in versions
        ]

    def nbytes(self) -> Alone:
        """Bytes of the storages that nobody but the engine holds."""
        on = {storage_id(version.holding.value): version for version in self.alone() if version.holding.value is not None}
        made_nbytes = sum(version.nbytes for storage, version in on.items() if storage == version.weak)
        return Alone(sum(version.nbytes for version in on.values()), made_nbytes)

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
        """The versions that may be let go, the largest first: those that no evicted tensor needs, and without which no more
        bytes stay in memory than they have. `evictable`: ids of the versions that may have to be evicted.
        """
        needed = self.needed()
        free = [v for v in self.alone() if v.id not in needed and v.holding.claim is not Claim.PINNED]
        return sorted((v for v in free if not evictable or self._costs_no_more(v, evictable)), key=lambda v: -v.nbytes)

    def gives_back(self, version: Version, evictable: Collection[int]) -> bool:
        """Whether an eviction of the version frees bytes: no start that its rebuild needs, and that would otherwise be let go,
        has as many as all that is rebuilt from it.
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
        """Whether the evictable versions that are rebuilt from a start have no more bytes than it."""
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
