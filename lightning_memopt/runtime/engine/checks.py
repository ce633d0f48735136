"""Checksums of the bytes that a plan drops or parks, to compare them with the bytes that come back (R8)."""

from __future__ import annotations

import torch

from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.rebuild import checksum, compare


class Checks:
    """The checksums of one forward.

    on: whether checksums are taken.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._sums: dict[int, tuple[int, int]] = {}

    def note(self, version: Version, t: torch.Tensor) -> None:
        """The bytes of the version are about to be dropped or parked: take their checksum. `t` is a tensor on them."""
        if self.on and version.id not in self._sums:
            with below_autograd():
                self._sums[version.id] = checksum(t)

    def compare(self, version: Version) -> None:
        """Autograd asks for the version. The first time, raise RebuildMismatchError if its checksum is another one."""
        then = self._sums.pop(version.id, None) if self._sums else None
        if version.next is None:  # else the memory was overwritten without moving a counter: autograd reads the new bytes
            compare(version, then)
