"""Gathered weights, and the hooks of sharded modules, in the graph (record/gathered.py has how they are seen).

A weight is a tensor with windows. A hook in backward is an op that reads and makes nothing: what it allocates and keeps is
there from its point on, what it frees is there up to the point before, and the rest of its peak is its workspace. So the
buffers of collectives are in the levels. In forward, planned ops are known by their positions, so a hook there is no op: its
peak belongs to the workspace of the op before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_memopt.graph import HOOK, LATE_HOOK
from lightning_memopt.record import StorageVersion
from lightning_memopt.trace.tracer import Tracer, backward_runs
from lightning_memopt.trace.unrecorded import unrecorded_op


class Gathered:
    """The windows of the weights of one round, and its hooks. Call `there` and `away` within `hook`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def there(self, version: StorageVersion, name: str) -> None:
        """The bytes of a weight are in memory. May be repeated."""
        tracer = self._tracer
        seen = tracer.tensors.get(version.id)
        if seen is None:
            tracer.adopt(version, "parameter", name)
            seen = tracer.tensors[version.id]
        elif seen.open_at is None:
            alive = version.alive()
            assert alive is not None, "a unit holds its weights"
            tracer.counts(version.id, alive)
        seen.opens(len(tracer.points))

    def away(self, version: StorageVersion) -> None:
        """The bytes of a weight are not in memory. May be repeated."""
        seen = self._tracer.tensors.get(version.id)
        if seen is not None and seen.open_at is not None:
            self._tracer.gone(version.id)
            seen.closes(len(self._tracer.points) - 1)

    @contextlib.contextmanager
    def hook(self, settles: bool) -> Iterator[None]:
        """Around a hook that the recorder does not see. `settles`: the buffers of its collectives are gone at its end."""
        tracer = self._tracer
        if not tracer.forward_over or not backward_runs():
            yield
            return
        tracer.backward_begins()
        with unrecorded_op(tracer, f"{HOOK}unit" if settles else LATE_HOOK, frees=True):
            yield
