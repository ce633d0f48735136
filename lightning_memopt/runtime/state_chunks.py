"""The chunks in which `Optimizer.step` gets its parameters, so that only a little of their state is on the device at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from lightning_memopt.runtime.parked import LEAST_NBYTES

_CHUNK_NBYTES = 32 << 20
"""The most state that a usual step has on the device at a time, if no parameter has more."""
_CHUNKS = 16
"""Where that is more, a usual step has this part of all state on the device: a step of so many parts takes little longer."""


@dataclass(frozen=True)
class GroupChunk:
    """Parameters of a group that a step updates together.

    group: their group.
    params: these parameters.
    nbytes: bytes of their state that is parked.
    comes_ahead: it is copied back while the chunk before it is updated.
    """

    group: dict[str, Any]
    params: list[torch.Tensor]
    nbytes: int
    comes_ahead: bool


class Chunks(list[Any]):
    """The groups of an optimizer. Whoever goes through them gets them, but the optimizer's step gets chunks.

    code: that of the step.
    chunks: gives the chunks, for the frame of the step.
    """

    def __init__(self, groups: list[Any], code: CodeType, chunks: Callable[[FrameType], Iterator[Any]]) -> None:
        super().__init__(groups)
        self._code = code
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        return self._chunks(caller) if caller.f_code is self._code else super().__iter__()


def chunks_of(groups: Iterable[dict[str, Any]], parked: Mapping[int, int]) -> list[GroupChunk]:
    """The chunks of a step, in the order of groups and parameters, so that state is made in the order of the plain run. A chunk
    has state that is parked, or state that stays; small parameters are in the chunk of those before them. `parked`: identity of
    a parameter whose state is parked -> bytes of that state.
    """
    most = min(_CHUNK_NBYTES, sum(parked.values()) // _CHUNKS)
    parts = [(group, part) for group in groups for part in _parts(group["params"], parked, most // 2)]
    sizes = [sum(parked.get(id(p), 0) for p in part) for _, part in parts]
    most = max(most, *sizes, 0)
    before = [most, *sizes]
    return [
        GroupChunk(group, part, nbytes, 0 < nbytes <= most - nbytes_before)
        for (group, part), nbytes, nbytes_before in zip(parts, sizes, before, strict=False)
    ]


def _parts(params: Sequence[torch.Tensor], parked: Mapping[int, int], most: int) -> list[list[torch.Tensor]]:
    """Parts of a group with `most` bytes of parked state, or one parameter."""
    parts: list[list[torch.Tensor]] = [[]]
    room = most
    stays: bool | None = None
    for p in params:
        nbytes = parked.get(id(p), 0)
        if nbytes or p.nbytes >= LEAST_NBYTES:
            if nbytes > room or stays is bool(nbytes):
                parts += [[]] if parts[-1] else []
                room = max(most, nbytes)
            stays = not nbytes
        parts[-1].append(p)
        room -= nbytes
    return parts
