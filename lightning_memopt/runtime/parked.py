"""Tensors that are away between forward and backward: in a tier, encoded on the device, or encoded in a tier.

The bytes of a storage go away once, however often autograd saves it. What the life of a tensor is to be decides the plan; here
is how its bytes leave and come back. Rules of lifetimes, each with a test (tests/cpu/test_away.py,
test_away_changes.py, test_hazards_i.py and test_hazards_j.py; A8: tests/gpu/test_away_cuda.py):

A1. The device bytes are held until the copy out has ended (`wait_gone`), whoever else lets go of them before.
A2. What is about to be overwritten, or handed out as raw memory, waits for its copy first. What changed unseen before its copy
    had ended is not read from there.
A3. The version counter that autograd compares is that of the tensor it saved, not that of what comes back.
A4. A copy in a tier stays until autograd has let go of every handle on it: a second backward fetches again.
A5. What a codec gives back is shown to autograd only where it has not the very bits: no rebuild starts from it. And only to the
    saves for which the plan has it: what another op saves, in a forward that leaves the plan, is kept as it is. It is not read
    outside of backward; where it is lossy, not with `create_graph` either.
A6. An exception on the way leaves nothing behind: bytes in tiers go with the last reference to this object. A copy back that
    failed, or was not waited for to its end, is begun anew by who asks next.
A7. What is encoded on the device goes when it is decoded for the last time, where backward takes its observed order and its
    graph is not retained. From then on what was decoded stays until autograd has let go of every handle on it.
A8. Streams are asked for at every step of the way: a backward node runs on the stream of its forward. Where one step is on
    another stream than the one before, they are put in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_memopt.errors import TierFullError
from lightning_memopt.plan.forms import EXACT, codec_of, tier_of
from lightning_memopt.record import fills, uncompiled
from lightning_memopt.runtime.codecs import codec
from lightning_memopt.runtime.tiers import Parked, Stopwatch, Tier

_UNTIMED, _TIMED = 2, 8
"""Where times are between events of a device: the first forwards, which are not like the others, then those that are timed."""


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of `t`, flat."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _stream_of(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def whole(t: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """A tensor that fills the storage of `t`: itself, or of this size where that fits, else in one dimension."""
    if fills(t):
        return t
    n = t.untyped_storage().nbytes() // t.element_size()
    strides = torch.empty(size if math.prod(size) == n else (n,), device="meta").stride()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), 0, size if math.prod(size) == n else (n,), strides
    )


@dataclass
class Depot:
    """The tiers of one plan, and what went through them. They have room for one forward; `more(name)` makes another tier, for
    forwards that begin before the backward of the ones before.

    `forwards` that began under the plan, `timed` of them; `moved_nbytes` in all of them, both ways. In those that are timed:
    how long their steps `waited` for copies, how long codecs ran (`coded`), how long copies took. On the host's clock all
    are timed, on a device a few: nobody waits for its events, but each of them takes time.
    """

    tiers: Mapping[str, Tier] = field(default_factory=dict)
    forwards: int = 0
    timed: int = 0
    moved_nbytes: int = 0
    waited: Stopwatch = field(default_factory=Stopwatch)
    coded: Stopwatch = field(default_factory=Stopwatch)
    more: Callable[[str], Tier] | None = None
    others: list[tuple[str, Tier]] = field(default_factory=list)
    _copied: tuple[Stopwatch, ...] = ()

    def __iter__(self) -> Iterator[Tier]:
        return iter((*self.tiers.values(), *(tier for _, tier in self.others)))

    def store(self, name: str, t: torch.Tensor, what: str) -> Parked:
        """In a tier of this name, a further one where those there are full. Raises OffloadError."""
        for tier in (self.tiers[name], *(tier for other, tier in self.others if other == name)):
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
        on = device == "cpu" or _UNTIMED <= self.forwards < _UNTIMED + _TIMED
        for watch in (self.waited, self.coded, *(tier.copied for tier in self)):
            watch.on = on
        self.forwards += 1
        self.timed += on

    @property
    def copied_seconds(self) -> float:
        """How long copies took: of the tier's file, or of the device."""
        return sum(watch.seconds for watch in (*self._copied, *(tier.copied for tier in self)))

    @property
    def used_nbytes(self) -> int:
        """What is away in the tiers now."""
        return sum(tier.used_nbytes for tier in self)

    def retire(self) -> None:
        """Nothing more goes away here. A tier in which something still is lives until the last of it goes."""
        self._copied += tuple(tier.copied for tier in self)
        for tier in self:
            if not tier.used_nbytes:
                tier.close()
        self.tiers, self.others, self.more = {}, [], None

    def close(self) -> None:
        for tier in self:
            tier.close()


class Away:
    """The bytes of one storage while it is away. `t` fills its storage; `what` names it in errors.

    Call everything below autograd, with dispatch modes off.
    """

    def __init__(self, depot: Depot, t: torch.Tensor, form: str, what: str) -> None:
        self.exact = codec_of(form) in EXACT
        self.gone = not tier_of(form)
        """Whether the device bytes are not read any more: they are encoded, or their copy has ended."""
        self.spent = False
        self.noted = 0
        """What the version counter of what autograd was shown must still say."""
        self._depot = depot
        self._size, self._stride, self._dtype, self._device = t.size(), t.stride(), t.dtype, t.device
        self._codec = codec(codec_of(form)) if codec_of(form) else None
        self.lossy = self._codec is not None and not self._codec.exact
        self._stored_on = self._begun_on = self._read_on = _stream_of(t.device)
        self._parked: Parked | None = None
        self._coming: torch.Tensor | None = None
        if self._codec is None:
            self._here: torch.Tensor | None = _bytes_of(t)
        else:
            nbytes = self._codec.encoded_nbytes(tuple(t.shape), t.dtype)
            self._here = torch.empty(nbytes, dtype=torch.uint8, device=t.device)
            with depot.coded.running(self._stored_on):
                self._codec.encode(t, self._here)
        self._nbytes = self._here.numel()
        if tier := tier_of(form):
            self._parked = depot.store(tier, self._here, what)
            depot.moved_nbytes += self._nbytes

    def wait_gone(self) -> None:
        """Returns when the bytes on the device may go, or be overwritten: on the current stream, whoever waited before."""
        if self._parked is not None:
            now = _stream_of(self._device)
            with self._depot.waited.running(now):
                self._parked.wait_stored()
            if self._stored_on != now:
                now.synchronize()  # A8: then it does not matter whose memory it is
            self._here, self.gone = None, True

    def begin(self) -> None:
        """Begin to bring the bytes back, where they are not on the device."""
        if self._parked is not None and self._coming is None:
            self._begun_on = _stream_of(self._device)
            coming = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            self._parked.fetch(coming)
            self._coming = coming  # not before: where the tier refuses, nothing comes
            self._depot.moved_nbytes += self._nbytes

    def spend(self) -> None:
        """What is encoded on the device was decoded for the last time; of what is in a tier only the value is on the device."""
        if self._parked is None:
            self._here, self.spent = None, True

    def put_off(self) -> None:
        """What has begun to come back is not wanted now."""
        self._coming = None

    def value(self) -> torch.Tensor:
        """The tensor, on new memory; waits for it."""
        self.begin()
        found = self._here
        if self._parked is not None:
            found, self._coming = self._coming, None  # where the copy fails or the wait is interrupted, it begins anew (A6)
            with self._depot.waited.running(_stream_of(self._device)):
                self._parked.wait_fetched()
        assert found is not None
        self._read_on = now = _stream_of(self._device)
        if self._begun_on != now:
            now.wait_stream(self._begun_on)  # A8
            found.record_stream(now)
        if self._codec is not None:
            out = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
            with self._depot.coded.running(now):
                self._codec.decode(found, out)
            return out
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(found.untyped_storage(), 0, self._size, self._stride)

    def in_order(self, shown: torch.Tensor) -> None:
        """A8: the current stream may read what `value` gave, and its memory is not used again before."""
        now = _stream_of(self._device)
        if now != self._read_on:
            now.wait_stream(self._read_on)
            shown.record_stream(now)
            self._read_on = now

    @uncompiled
    def __del__(self) -> None:
        parked = getattr(self, "_parked", None)
        if parked is not None:
            parked.release()
