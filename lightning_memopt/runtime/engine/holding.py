"""What an engine holds of a storage version: its bytes, where they are, and who may still ask for them.

NOTE [States of a holding]. A holding is in one of four states, by what it has of the bytes:

    state     value    parked   the bytes are
    EMPTY     no       no       not held: rebuilt on demand where they are `reachable`, else gone for good
    HELD      yes      no       in memory
    COPIED    yes      yes      in memory, and parked: the copy out is under way, or came back
    PARKED    no       yes      parked only

Five doors lead from one to another; nothing else sets `value`, `expected`, `stream` and `parked`, which change together:

    door      from              to                by whom
    hold      EMPTY, HELD       HELD              the forward: an alias of the step's own memory, whose counter may still move
              COPIED, PARKED    COPIED
    rebuilt   EMPTY, HELD       HELD              a rebuild, a copy, or a fetch: memory of our own, whose counter must not move
              COPIED, PARKED    COPIED
    drop      HELD, EMPTY       EMPTY             a plan that lets go, eviction, autograd's last handle
              COPIED, PARKED    PARKED
    park      HELD              COPIED            a plan that parks: the copy out begins while the value is there
              EMPTY             PARKED            the same, of bytes that autograd or the user holds
    unpark    COPIED            HELD              the parked copy is not needed any more, or was found to be wrong
              PARKED            EMPTY

`settle` ends the forward: from then on the counter of a value that was held must stay what it is (R5). `set_aside` is a drop
that is taken back.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from lightning_memopt.record import UNKNOWN, StorageVersion, detached
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.parked import ParkedTensor
from lightning_memopt.torch_private import no_dispatch_modes


class Claim(enum.Enum):
    """Whether autograd reads a version through a save of an earlier version of the same memory, where no version counter moves
    (`.data`).
    """

    NONE = "autograd saved no earlier version"
    POSSIBLE = "autograd saved an earlier version, and may read this one"
    PINNED = "it may, and nothing makes the bytes again: the value stays"


_NONE = Claim.NONE


class Holding:
    """See NOTE [States of a holding].

    value: a tensor on the bytes, where they are in memory.
    expected: what the version counter of `value` must say when a rebuild or autograd reads it; UNKNOWN while the forward runs.
    stream: on CUDA, the stream in whose order a rebuild made or last read the bytes; None for memory of the forward.
    parked: the bytes in another form, where there are such.
    reachable: a rebuild can have the bytes: they are held or parked, or the version's call makes them from such.
    handles: how many handles of autograd are on the version.
    claim: see `Claim`.
    tensor: the tensor of the plan's graph that the version is; None where it was not matched to any.
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
        """Hold what the forward has just made or read: an alias of `t` without history, with the counter of `t`."""
        self.value = detached(t)
        self.expected = UNKNOWN
        self.stream = None

    def rebuilt(self, value: torch.Tensor, stream: Any = None) -> None:
        """`value` has the bytes, in memory that nobody else writes to. `stream`: see the class; None where the user has put
        things in order.
        """
        self.value = value
        self.expected = value._version
        self.stream = stream

    def drop(self) -> None:
        """Let go of the bytes in memory."""
        self.value = None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[torch.Tensor]:
        """Within, the holding is as if its value had been dropped; afterwards it has it again. Gives the value."""
        value, expected, stream = self.value, self.expected, self.stream
        assert value is not None, "there is nothing to set aside"
        self.value = None
        try:
            yield value
        finally:
            self.value, self.expected, self.stream = value, expected, stream

    def park(self, parked: ParkedTensor) -> None:
        """The bytes are copied to another form."""
        assert self.parked is None, "a storage version is parked once"
        self.parked = parked
        if parked.exact:
            self.reachable = True

    def unpark(self) -> None:
        """The parked copy is not needed any more."""
        self.parked = None

    def settle(self, counter: int) -> None:
        """The forward is over. `counter`: what the version's counter said, negative where that is not known."""
        if self.value is not None and self.expected == UNKNOWN:  # else it came back, or was rebuilt, for a backward inside
            self.expected = self.value._version if counter < 0 else counter

    @property
    def intact(self) -> bool:
        """Whether the value is what it was when the forward ended, or when it was rebuilt.

        A counter goes back only where torch was told to put it back, by who vouches for the bytes (FSDP gathers weights so).
        """
        return self.value is None or self.expected == UNKNOWN or self.value._version <= self.expected

    def fetch(self) -> bool:
        """Bring back the value where the parked bytes are bit-identical; whether there are such."""
        if self.parked is None or not self.parked.exact or self.parked.spent:
            return False
        with below_autograd():
            value = self.parked.value()
        self.rebuilt(value, current_stream(value))
        return True


Version: TypeAlias = StorageVersion[Holding]


def rebuildable(version: Version) -> bool:
    """Whether the version's own call makes its bytes again, from what is held or reachable."""
    return version.call is not None and version.holding.reachable


def current_stream(value: torch.Tensor) -> Any:
    """The CUDA stream of this moment on the value's device; None on the CPU."""
    return torch.cuda.current_stream(value.device) if value.is_cuda else None


def in_order(holding: Holding) -> None:
    """R11: the current CUDA stream may read the value from here on, and its memory is not used again before."""
    value = holding.value
    if value is None or not value.is_cuda:
        return
    stream = torch.cuda.current_stream(value.device)
    if holding.stream == stream:
        return
    if holding.stream is not None:  # a rebuild on another stream; what the forward made, the user has put in order
        stream.wait_stream(holding.stream)
    with no_dispatch_modes():  # no op of the step
        value.record_stream(stream)
    holding.stream = stream


def copy_of(t: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage of `t`, flat. Call below autograd."""
    bytes_ = t.untyped_storage().clone()
    copy = torch.empty(0, dtype=t.dtype, device=t.device)
    return copy.set_(bytes_, 0, (bytes_.nbytes() // copy.element_size(),), (1,))


class Holdings:
    """What is held of the storage versions of one forward: the rules that every engine shares (`record.Holdings`)."""

    def met(self, version: Version) -> None:
        version.holding.reachable = True

    def read(self, version: Version, t: torch.Tensor) -> None:
        holding: Holding = version.holding
        if holding.value is None:
            holding.hold(t)  # never the tensor itself: its `.data` may become another memory

    def made(self, version: Version, reachable: bool) -> None:
        version.holding.reachable = reachable

    def overwrites(self, version: Version) -> None:
        if rebuildable(version):
            version.holding.drop()  # an alias of the memory that is about to change: its call makes the bytes again
        elif version.read:
            self.copy(version)

    def copy(self, version: Version) -> None:
        """R5: rebuilds that start from the version keep a copy of what it was."""
        holding: Holding = version.holding
        if holding.value is not None:
            with below_autograd():
                value = copy_of(holding.value)
            holding.rebuilt(value, current_stream(value))
            version.counter = value._version

    def overwritten(self, old: Version, new: Version, t: torch.Tensor, reachable: bool) -> None:
        before: Holding = old.holding
        after: Holding = new.holding
        after.reachable = reachable if new.call is not None else new.external
        if before.handles or before.claim is not Claim.NONE:
            after.claim = Claim.POSSIBLE
        if (before.handles or before.claim is Claim.PINNED) and not rebuildable(new):
            after.hold(t)  # autograd reads these bytes where the version counter of what it saved does not move
            after.claim = Claim.PINNED

    def replaced(self, old: Version, new: Version, t: torch.Tensor) -> bool:
        before: Holding = old.holding
        if rebuildable(old):
            before.drop()
        if before.handles or before.claim is not Claim.NONE:
            new.holding.claim = Claim.POSSIBLE
        return before.value is not None

    def recounted(self, version: Version, t: torch.Tensor) -> None:
        if version.holding.value is not None:
            version.holding.hold(t)  # with the counter that was read

    def unchanged(self, version: Version) -> bool:
        value = version.holding.value
        return value is not None and value._version == version.counter

    def startable(self, versions: Sequence[Version]) -> bool:
        return all(v.holding.reachable or v.holding.value is not None or v.empty for v in versions)
