"""A `Holding` is what an engine holds of a storage version: its bytes, where they are, and who may still ask for them.

NOTE [States of a holding]. A holding is in one of four states:

    state     value    parked   the bytes are
    EMPTY     no       no       not held: rebuilt on demand where they are `reachable`, else lost
    HELD      yes      no       in memory
    COPIED    yes      yes      in memory and parked: they are being copied out, or were fetched
    PARKED    no       yes      parked only

Five methods lead from one state to another. Nothing else sets `value`, `expected`, `stream` and `parked`, which change
together:

    method    from              to                called for
    hold      EMPTY, HELD       HELD              the forward: an alias of the step's own memory, whose counter may still move
              COPIED, PARKED    COPIED
    rebuilt   EMPTY, HELD       HELD              a rebuild, a copy, or a fetch: new memory, whose counter must not move
              COPIED, PARKED    COPIED
    drop      HELD, EMPTY       EMPTY             a plan that drops, an eviction, the release of the last handle
              COPIED, PARKED    PARKED
    park      HELD              COPIED            a plan that parks: the copy out begins while the value is in memory
              EMPTY             PARKED            the same; autograd or the user holds the bytes
    unpark    COPIED            HELD              the parked copy is no longer needed, or is wrong
              PARKED            EMPTY

`settle` ends the forward: from then on the counter of a held value must not change (R5). `set_aside` drops the value for a
while.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lightning_memopt.device.backends import current_stream
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import UNKNOWN, Call, Origin, StorageVersion, detached
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.tensors import bytes_of
from lightning_memopt.runtime.parked import ParkedTensor
from lightning_memopt.torch_private import no_dispatch_modes


class Claim(enum.Enum):
    """Whether autograd may read a version through a save of an earlier version of the same memory. That happens when the memory
    was overwritten and no version counter moved:

        y = x.exp()          # autograd saves y
        y.data.mul_(2)       # the memory changes, and the counter of y does not
        y.sum().backward()   # autograd reads the bytes that are there now
    """

    NONE = "autograd saved no earlier version"
    POSSIBLE = "autograd saved an earlier version, and may read this one"
    PINNED = "it may, and no call rebuilds the bytes: the value stays"


_NONE = Claim.NONE
_EMPTY = Origin.EMPTY


class Holding:
    """What an engine holds of one storage version. See NOTE [States of a holding]. Where the native engine is loaded, a version
    is its own holding (`StorageVersion`).

    value: a tensor on the bytes if they are in memory, else None.
    expected: the version counter that `value` must have when a rebuild or autograd reads it; UNKNOWN while the forward runs.
    stream: on CUDA, the stream on which a rebuild made or last read the bytes; None for memory of the forward.
    parked: the bytes in another form; None if they are not parked.
    reachable: whether a rebuild can use the bytes: they are held or parked, or the call can make them from reachable bytes.
    handles: number of autograd's handles on the version.
    claim: see `Claim`.
    tensor: the tensor of the plan's graph to which the version was matched, or None.
    """

    __slots__ = ("claim", "expected", "handles", "parked", "reachable", "stream", "tensor", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.expected = UNKNOWN
        self.stream: Any = None
        self.parked: ParkedTensor | None = None
        self.reachable = False
        self.handles = 0
        self.claim = _NONE
        self.tensor: int | None = None

    def hold(self, t: torch.Tensor) -> None:
        """Hold bytes that the forward has just made or read: an alias of `t` without history, with the counter of `t`."""
        native = loaded()
        self.value = detached(t) if native is None else native.alias(t)
        self.expected = UNKNOWN
        self.stream = None

    def rebuilt(self, value: torch.Tensor, stream: Any = None) -> None:
        """Hold `value`, which has the bytes in memory that only the engine writes to.

        `stream`: see the class; None if the user has already ordered the streams.
        """
        self.value = value
        self.expected = value._version
        self.stream = stream

    def drop(self) -> None:
        """Drop the bytes in memory."""
        self.value = None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[torch.Tensor]:
        """Within, the holding has no value. Afterwards it has its value again. Yields the value."""
        value, expected, stream = self.value, self.expected, self.stream
        assert value is not None, "there is nothing to set aside"
        self.value = None
        try:
            yield value
        finally:
            self.value, self.expected, self.stream = value, expected, stream

    def park(self, parked: ParkedTensor) -> None:
        """The bytes are being copied to another form."""
        assert self.parked is None, "a storage version is parked once"
        self.parked = parked
        if parked.exact:
            self.reachable = True

    def unpark(self) -> None:
        """Forget the parked copy."""
        self.parked = None

    def inherit_claim(self, earlier: Holding) -> None:
        """Take over autograd's claim on `earlier`, the holding of an earlier version of the same memory."""
        if earlier.handles or earlier.claim is not Claim.NONE:
            self.claim = Claim.POSSIBLE

    @property
    def intact(self) -> bool:
        """Whether the value has not changed since the forward ended, or since it was rebuilt.

        A smaller counter is not a change: code that sets it back also restores the bytes (FSDP, when it gathers weights).
        """
        return self.value is None or self.expected == UNKNOWN or self.value._version <= self.expected

    @property
    def there(self) -> bool:
        """Whether the bytes are in memory, or parked bit-identically. Calls no torch function, which the user's modes would
        see.
        """
        return self.value is not None or self._fetchable is not None

    @property
    def _fetchable(self) -> ParkedTensor | None:
        """The parked bytes, if they are bit-identical and were not decoded for the last time; else None."""
        parked = self.parked
        return parked if parked is not None and parked.exact and not parked.spent else None

    def fetch(self) -> bool:
        """Fetch the value if it is parked bit-identically. Returns whether it was."""
        parked = self._fetchable
        if parked is None:
            return False
        with below_autograd():
            value = parked.value()
        self.rebuilt(value, current_stream(value.device))
        return True


Version: TypeAlias = StorageVersion[Holding]


def settle(versions: Iterable[Version]) -> None:
    """The forward of these versions is over."""
    for version in versions:
        holding: Holding = version.holding
        if holding.value is not None and holding.expected == UNKNOWN:  # else a backward in the forward rebuilt it
            holding.expected = holding.value._version if version.counter < 0 else version.counter


def rebuildable(version: Version) -> bool:
    """Whether the version's own call can make its bytes again, from what was held or reachable when it was recorded."""
    return version.call is not None and version.holding.reachable


def can_make(version: Version, versions: Mapping[int, Version]) -> bool:
    """Whether the version's own call can make its bytes again now, from what is in memory or parked. `versions`: the tape's.

    `rebuildable` says whether that was so when the version was recorded. Later the plan lets go of bytes that no op can make
    again, when its own rebuilds no longer need them. A version that was rebuilt from them then cannot be made again.
    """
    wanted, seen = [version], {version.id}
    while wanted:
        version = wanted.pop()
        call = version.call
        if call is None or not (call.repeats and (version.holding.reachable or version.empty)):
            return False
        for id in call.reads:
            source = versions[id]
            if id not in seen and not source.holding.there:
                seen.add(id)
                wanted.append(source)
    return True


def in_order(holding: Holding) -> None:
    """R11: make the current stream wait until the value is made, and the allocator reuse its memory only after this stream."""
    value = holding.value
    if value is None:
        return
    stream = current_stream(value.device)
    if stream is None or holding.stream == stream:
        return
    if holding.stream is not None:  # else it is memory of the forward, and the user has ordered the streams
        stream.wait_stream(holding.stream)
    with no_dispatch_modes():  # it is not an op of the step
        value.record_stream(stream)
    holding.stream = stream


def copy_of(t: torch.Tensor) -> torch.Tensor:
    """A flat copy of the whole storage of `t`. It is made by an op, because a copy of the storage object would not be counted
    as memory, and the recorder would take it for a copy that the user makes. Call below autograd.
    """
    storage = bytes_of(t).clone().untyped_storage()
    copy = torch.empty(0, dtype=t.dtype, device=t.device)
    return copy.set_(storage, 0, (storage.nbytes() // copy.element_size(),), (1,))


class Holdings:
    """The rules of both engines for what is held of the storage versions of one forward (see `record.Holdings`)."""

    def makes_again(self, version: Version) -> bool:
        """Whether the bytes of the version may be dropped in the forward, because its own call can make them again."""
        return rebuildable(version)

    def met(self, version: Version) -> None:
        version.holding.reachable = True

    def read(self, version: Version, t: torch.Tensor) -> None:
        holding: Holding = version.holding
        if holding.value is None:
            holding.hold(t)  # an alias, not the tensor: the user may set its `.data`

    def made(self, version: Version, reachable: bool) -> None:
        version.holding.reachable = reachable

    def overwrites(self, version: Version) -> None:
        if self.makes_again(version):
            version.holding.drop()  # it is an alias of the memory that is about to change; its call can rebuild the bytes
        elif version.read:
            self.copy(version)

    def copy(self, version: Version) -> None:
        """R5: hold a copy of the bytes, from which rebuilds start and which are about to change."""
        holding: Holding = version.holding
        if holding.value is not None:
            with below_autograd():
                value = copy_of(holding.value)
            holding.rebuilt(value, current_stream(value.device))
            version.counter = value._version

    def overwritten(self, old: Version, new: Version, t: torch.Tensor, reachable: bool) -> None:
        before: Holding = old.holding
        after: Holding = new.holding
        after.reachable = reachable if new.call is not None else new.external
        after.inherit_claim(before)
        if (before.handles or before.claim is Claim.PINNED) and not rebuildable(new):
            after.hold(t)  # autograd reads these bytes if the counter of the tensor that it saved does not move
            after.claim = Claim.PINNED

    def replaced(self, old: Version, new: Version, t: torch.Tensor) -> bool:
        before: Holding = old.holding
        if self.makes_again(old):
            before.drop()
        new.holding.inherit_claim(before)
        return before.value is not None

    def recounted(self, version: Version, t: torch.Tensor) -> None:
        if version.holding.value is not None:
            version.holding.hold(t)  # with the counter that was read

    def unchanged(self, version: Version) -> bool:
        value = version.holding.value
        return value is not None and value._version == version.counter

    def can_run(self, call: Call | None, reads: Sequence[Version]) -> bool:
        if call is None or not call.repeats:
            return False
        for version in reads:
            holding = version.holding
            if not (holding.reachable or holding.value is not None or version.origin is _EMPTY):
                return False
        return True
