"""The segments that the real allocator has when a plan is made: the model starts from them instead of from empty memory.

Parameters and optimizer state stay in their blocks for the whole run. Other blocks in their segments are freed meanwhile, and
what a later step reserves depends on these holes. In: the "segments" of `torch.cuda.memory._snapshot()`, and the tensors of the
step by address. Blocks of private pools (CUDA graphs) serve nobody else: only their bytes count.

If several segments could serve a request, their order decides. It is not known for full segments, because device/segments.py
finds the order by means of free blocks. Gradients that are freed before the next step make room in full segments. If there are
such segments, two orders are tried: these segments serve after all others, or before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lightning_memopt.graph.model import Kind
from lightning_memopt.plan.allocator.model import Allocator, Found, Placed
from lightning_memopt.plan.allocator.settings import MIN_BLOCK_NBYTES

_HELD = "active_allocated"


@dataclass(frozen=True, slots=True)
class There:
    """A block that somebody holds. `requested`: the bytes that were requested; a large block may have more. `kind`: the kind of
    the tensor in it; "" if it is not known.
    """

    address: int
    requested: int
    kind: Kind | str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is in memory when a step begins."""

    name: int
    nbytes: int
    kind: Kind


class Beginning:
    """The allocator as it was found.

    segments: in the order in which they serve a request that several of them could serve.
    kinds: address -> kind of the tensor there.
    orders: the number of orders in which the segments may serve.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]], kinds: Mapping[int, Kind]) -> None:
        own: list[Mapping[str, Any]] = []
        self._beside_nbytes = 0
        for segment in segments:
            if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0):
                own.append(segment)
            else:
                self._beside_nbytes += int(segment["total_size"])
        full = [segment for segment in own if _frees_gradients(segment, kinds)]
        others = [segment for segment in own if segment not in full] if full else own
        orders = ([*others, *full], [*full, *others]) if full else (own,)
        self._orders = [_in_order(order, kinds) for order in orders]
        self.orders = len(orders)

    def enter(self, allocator: Allocator, wanted: Iterable[Wanted], unseen: Iterable[Wanted], order: int = 0) -> list[Wanted]:
        """Put the segments into a fresh model, and each wanted tensor into a block of its size, preferably one of its kind.

        Blocks without a tensor are freed: they have gradients and temporary tensors, which the step makes again. Of these
        blocks, as many bytes stay as are `unseen`: bytes that belong to no tensor of the step (a library's workspace). Returns
        the tensors that got no block. Tensors of 0 bytes (on another device) need none.
        """
        segments, held = self._orders[order]
        allocator.enter(segments, self._beside_nbytes)
        blocks: dict[tuple[int, Kind | str], list[There]] = {}
        for there in reversed(held):
            blocks.setdefault((allocator.settings.rounded(there.requested), there.kind), []).append(there)
        missing = [w for w in wanted if w.nbytes and not self._takes(allocator, w, blocks, (w.kind,))]
        missing = [w for w in missing if not self._takes(allocator, w, blocks, _instead(w.kind))]
        left = sorted((t for free in blocks.values() for t in free), key=lambda t: (-t.requested, t.address))
        for w in unseen:
            nbytes = w.nbytes
            for there in tuple(left):
                if there.requested <= nbytes and there.kind != "gradient":
                    nbytes -= there.requested
                    left.remove(there)
            if nbytes >= MIN_BLOCK_NBYTES:  # less than a block comes from rounding up the sum of their bytes
                missing.append(Wanted(w.name, nbytes, w.kind))
        for there in left:
            allocator.free(_name(there))
        return missing

    def _takes(
        self,
        allocator: Allocator,
        wanted: Wanted,
        blocks: dict[tuple[int, Kind | str], list[There]],
        kinds: Iterable[Kind | str],
    ) -> bool:
        """Give a tensor a block of one of these kinds; False if there is none."""
        size = allocator.settings.rounded(wanted.nbytes)
        for kind in kinds:
            if free := blocks.get((size, kind)):
                allocator.rename(_name(free.pop()), wanted.name)
                return True
        return False


def _frees_gradients(segment: Mapping[str, Any], kinds: Mapping[int, Kind]) -> bool:
    """Whether a segment is full, and is no longer full after gradients are freed."""
    if segment.get("is_expandable") or any(block["state"] != _HELD for block in segment["blocks"]):
        return False
    address = int(segment["address"])
    for block in segment["blocks"]:
        if kinds.get(address) == "gradient":
            return True
        address += int(block["size"])
    return False


def _in_order(segments: Sequence[Mapping[str, Any]], kinds: Mapping[int, Kind]) -> tuple[list[Found], list[There]]:
    """The segments, moved so that they serve in this order, and the blocks that somebody holds, both by address."""
    moved = _by_order(segments)
    found: list[Found] = []
    there: list[There] = []
    for segment in segments:
        by = moved.get(int(segment["address"]), 0)
        found.append(_found(segment, by))
        held = (block for block in found[-1].blocks if block.requested)
        there += [There(b.address, b.requested, kinds.get(b.address - by, "")) for b in held]
    found.sort(key=lambda segment: segment.blocks[0].address)
    there.sort(key=lambda block: block.address)
    return found, there


def _instead(kind: Kind) -> tuple[Kind | str, ...]:
    """Kinds of blocks that may hold a tensor of this kind, too: the addresses of the batch and of buffers are not always
    known.
    """
    return () if kind == "gradient" else ("", "input", "buffer", "temporary", "optimizer_state", "parameter")


def _name(there: There) -> tuple[str, int]:
    return "there", there.address


def _by_order(segments: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Address of a segment -> by how much it is moved. After the moves, addresses rise in the order of the segments, because
    the model takes the lowest of equal blocks. Expandable segments stay, because there is only one for each pool and stream.
    """
    end = max((int(s["address"]) + int(s["total_size"]) for s in segments), default=0)
    moved: dict[int, int] = {}
    for segment in segments:
        if not segment.get("is_expandable"):
            moved[int(segment["address"])] = end - int(segment["address"])
            end += int(segment["total_size"])
    return moved


def _found(segment: Mapping[str, Any], by: int) -> Found:
    """The segment with its addresses moved by `by`."""

    def placed() -> Iterator[Placed]:
        address = int(segment["address"]) + by
        for is_held, run in groupby(segment["blocks"], lambda block: block["state"] == _HELD):
            blocks = list(run)
            for together in [[b] for b in blocks] if is_held else [blocks]:  # blocks that streams still read count as free
                nbytes = sum(int(b["size"]) for b in together)
                requested = max(1, int(together[0].get("requested_size", nbytes))) if is_held else 0
                yield Placed(address, nbytes, requested)
                address += nbytes

    small, expandable = segment["segment_type"] == "small", bool(segment.get("is_expandable"))
    return Found(int(segment["stream"]), small, expandable, tuple(placed()))
