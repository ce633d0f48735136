"""Tensors that are parked between forward and backward: in a tier, encoded on the device, or encoded in a tier.

The bytes of a storage are parked once, however often autograd saves it. The plan decides the lives of a tensor; this file moves
its bytes out and back. Rules of lifetimes, each with a test (tests/cpu/parking/test_away.py, test_away_changes.py,
test_hazards_i.py and test_hazards_j.py; A8: tests/gpu/test_away_cuda.py):

A1. The device bytes are held until the copy out has ended (`wait_copied`), even if everything else lets go of them before.
A2. Before bytes are overwritten, or handed out as raw memory, their copy must end. If bytes changed unseen before that, the
    copy is not used.
A3. Autograd compares the version counter of the tensor that it saved, not that of the tensor that comes back.
A4. A copy in a tier stays until autograd has released every handle on it, so that a second backward can fetch it again.
A5. A decoded value that is not bit-identical is given only to autograd, and no rebuild starts from it. It is given only for the
    saves for which the plan has chosen the codec: a save of another op, in a forward that deviates, is kept as it is. It cannot
    be read outside of backward, and a lossy one cannot be read with `create_graph` either.
A6. An exception leaves nothing behind: bytes in tiers are freed with the last reference to this object. A copy back that
    failed, or whose wait was interrupted, begins anew at the next request.
A7. Bytes that are encoded on the device are freed when they are decoded for the last time, if backward runs in the observed
    order and its graph is not retained. From then on the decoded value stays until autograd has released every handle on it.
A8. Each operation looks up the current stream, because a backward node runs on the stream of its forward. If two operations are
    on different streams, the later one waits for the earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lightning_memopt.device.backends import current_stream
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import TierFullError
from lightning_memopt.plan.forms import EXACT, codec_of, tier_of
from lightning_memopt.record import fills, uncompiled
from lightning_memopt.record.tensors import bytes_of
from lightning_memopt.runtime import spans
from lightning_memopt.runtime.codecs import codec
from lightning_memopt.runtime.tiers import Stopwatch, Stored, Tier

LEAST_NBYTES = 4096
"""Smaller tensors are not parked, because a copy or a codec would take more time than it is worth."""
_UNTIMED, _TIMED = 2, 8
"""On a device, which is timed by events: number of forwards that are not timed at first, and number of those that then are."""


def whole(t: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """A tensor that fills the storage of `t`: `t` itself, or one of this size if that fits, else a 1-D tensor."""
    if fills(t):
        return t
    n = t.untyped_storage().nbytes() // t.element_size()
    strides = torch.empty(size if math.prod(size) == n else (n,), device="meta").stride()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), 0, size if math.prod(size) == n else (n,), strides
    )


@dataclass
class Depot:
    """The tiers of one plan, and how much went through them.

    tiers: name -> tier. They have room for one forward, as far as a limit allows it.
    forwards: number of forwards that began under the plan.
    timed: number of these that are timed: all by the host's clock, a few on a device (nothing waits for its events, but each
        event takes time).
    moved_nbytes: bytes that all forwards moved, out and back.
    waited: seconds that the timed steps waited for copies.
    coded: seconds that codecs ran in the timed steps.
    more: makes another tier of a name, for a forward that begins before the backward of an earlier one has ended.
    others: name -> the tiers that `more` made.
    wanted: name -> the bytes that its tier should have.
    """

    tiers: dict[str, Tier] = field(default_factory=dict)
    forwards: int = 0
    timed: int = 0
    moved_nbytes: int = 0
    waited: Stopwatch = field(default_factory=Stopwatch)
    coded: Stopwatch = field(default_factory=Stopwatch)
    more: Callable[[str], Tier] | None = None
    others: list[tuple[str, Tier]] = field(default_factory=list)
    wanted: Mapping[str, int] = field(default_factory=dict)
    _copied: tuple[Stopwatch, ...] = ()
    _watches: dict[str, Stopwatch] = field(default_factory=dict)
    """Name -> times the copies of this depot in a tier that others use in turn."""

    def __iter__(self) -> Iterator[Tier]:
        return iter((*self.tiers.values(), *(tier for _, tier in self.others)))

    def store(self, name: str, t: torch.Tensor, what: str) -> Stored:
        """Store `t` in a tier of this name, or in a further one if those are full. Raises OffloadError; TierFullError if there
        may be no further one.
        """
        own = [self.tiers[name]] if name in self.tiers else []
        for tier in (*own, *(tier for other, tier in self.others if other == name)):
            try:
                return tier.store(t, what)
            except TierFullError:
                if self.more is None:
                    raise
        assert self.more is not None
        self.others.append((name, self.more(name)))
        return self.others[-1][1].store(t, what)

    def begins(self, device: str) -> None:
        """A planned forward begins on a device of this type."""
        on = kind_of(device).is_host or _UNTIMED <= self.forwards < _UNTIMED + _TIMED
        for watch in (self.waited, self.coded, *(tier.copied for tier in self)):
            watch.on = on
        self.forwards += 1
        self.timed += on

    @property
    def copied_seconds(self) -> float:
        """Seconds that copies took, by the tier's file or by the device."""
        watches = (*self._copied, *self._watches.values(), *(tier.copied for tier in self))
        return sum(watch.seconds for watch in {id(watch): watch for watch in watches}.values())

    @property
    def used_nbytes(self) -> int:
        """Bytes that are parked in the tiers now."""
        return sum(tier.used_nbytes for tier in self)

    def retire(self) -> None:
        """Park nothing more here. A tier that still has bytes is closed when the last of them are freed."""
        self._copied += tuple(tier.copied for tier in self)
        for tier in self:
            if not tier.used_nbytes:
                tier.close()
        self.tiers, self.others, self.more = {}, [], None

    def capacity_nbytes(self, name: str) -> int:
        """The bytes of the tier of this name; 0 without one."""
        return self.tiers[name].capacity_nbytes if name in self.tiers else 0

    def take_over(self, name: str, other: Depot) -> None:
        """Get the tier of this name from another depot, which has nothing parked there."""
        tier = self.tiers[name] = other.tiers.pop(name)
        other._watches.setdefault(name, tier.copied)
        tier.copied = self._watches.setdefault(name, tier.copied.another())

    def close_tiers(self) -> None:
        """Close all tiers. Nothing is parked there; what is parked later needs new ones."""
        self._copied += tuple(tier.copied for tier in self)
        self.close()
        self.tiers, self.others = {}, []

    def close(self) -> None:
        for tier in self:
            tier.close()


class ParkedTensor:
    """The bytes of one storage while they are parked. `t` fills its storage; `what` names it in errors.

    exact: whether the tensor comes back bit-identical.
    lossy: whether the codec changes gradients. (A lossless codec need not be `exact`: it is enough that the one op that reads
        its value gives the same result.)
    copied: whether the device bytes are not read any more, because they are encoded, or their copy has ended.
    spent: whether they were decoded for the last time.
    shown: a decoded value that is not bit-identical, for autograd alone.
    expected: the version counter that `shown` must have.

    Call everything below autograd, with dispatch modes off.
    """

    def __init__(self, depot: Depot, t: torch.Tensor, form: str, what: str) -> None:
        self.exact = codec_of(form) in EXACT
        self.copied = not tier_of(form)
        self.spent = False
        self.shown: torch.Tensor | None = None
        self.expected = 0
        self._depot = depot
        self._size, self._stride, self._dtype, self._device = t.size(), t.stride(), t.dtype, t.device
        self._codec = codec(codec_of(form)) if codec_of(form) else None
        self.lossy = self._codec is not None and not self._codec.exact
        self._stored_on = self._begun_on = self._read_on = current_stream(t.device)
        self._stored: Stored | None = None
        self._arriving: torch.Tensor | None = None
        if self._codec is None:
            self._bytes: torch.Tensor | None = bytes_of(t)
        else:
            nbytes = self._codec.encoded_nbytes(tuple(t.shape), t.dtype)
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=t.device)
            with depot.coded.running(self._stored_on):
                self._codec.encode(t, self._bytes)
        self._nbytes = self._bytes.numel()
        if tier := tier_of(form):
            with spans.transfer("park", self._nbytes):
                self._stored = depot.store(tier, self._bytes, what)
            depot.moved_nbytes += self._nbytes

    def wait_copied(self) -> None:
        """Returns when the bytes on the device may be freed or overwritten by work on the current stream."""
        if self._stored is not None:
            now = current_stream(self._device)
            with self._depot.waited.running(now):
                self._stored.wait_stored()
            if self._stored_on != now:
                now.synchronize()  # A8: for memory of any stream
            self._bytes, self.copied = None, True

    def begin_fetch(self) -> None:
        """Begin to bring the bytes back, if they are not on the device."""
        if self._stored is not None and self._arriving is None:
            self._begun_on = current_stream(self._device)
            arriving = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            with spans.transfer("fetch", self._nbytes):
                self._stored.fetch(arriving)
            self._arriving = arriving  # set last: if the tier refuses, nothing will arrive
            self._depot.moved_nbytes += self._nbytes

    def cancel_fetch(self) -> None:
        """Drop the bytes that have begun to come back."""
        self._arriving = None

    def spend(self) -> None:
        """The bytes were decoded for the last time: free them if they are encoded on the device. (Bytes in a tier take no
        memory there.)
        """
        if self._stored is None:
            self._bytes, self.spent = None, True

    def value(self) -> torch.Tensor:
        """The tensor, in new memory. Waits for the copy."""
        self.begin_fetch()
        bytes_ = self._bytes
        if self._stored is not None:
            # if the copy fails or the wait is interrupted, the next call begins anew (A6)
            bytes_, self._arriving = self._arriving, None
            with self._depot.waited.running(current_stream(self._device)), spans.transfer("wait for", self._nbytes):
                self._stored.wait_fetched()
        assert bytes_ is not None
        self._read_on = now = current_stream(self._device)
        if self._begun_on != now:
            now.wait_stream(self._begun_on)  # A8
            bytes_.record_stream(now)
        if self._codec is not None:
            out = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
            with self._depot.coded.running(now):
                self._codec.decode(bytes_, out)
            return out
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return empty.set_(bytes_.untyped_storage(), 0, self._size, self._stride)

    def in_order(self, shown: torch.Tensor) -> None:
        """A8: let the current stream read a result of `value`. Its memory is not reused before that."""
        now = current_stream(self._device)
        if now != self._read_on:
            now.wait_stream(self._read_on)
            shown.record_stream(now)
            self._read_on = now

    @uncompiled
    def __del__(self) -> None:
        stored = getattr(self, "_stored", None)
        if stored is not None:
            stored.release()
