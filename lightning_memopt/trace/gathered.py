"""Put gathered weights, and the hooks of sharded modules, into the graph (record/gathered.py sees them).

A weight is a tensor with windows. A hook in backward becomes an op that reads and makes no tensors. What it allocates and keeps
is in memory from its point on, what it frees is in memory up to the point before, and the rest of its peak is its workspace. So
the graph counts the buffers of collectives. In forward, planned ops are known by their positions, so a hook there must not be
an op: its peak belongs to the workspace of the op before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_memopt.graph import HOOK, LATE_HOOK
from lightning_memopt.record import StorageVersion
from lightning_memopt.trace.tracer import Tracer, backward_runs
from lightning_memopt.trace.unrecorded import unrecorded_op


class Gathered:
    """Adds the weights' windows and the hooks of one round to the graph. Call `there` and `away` within `hook`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def there(self, version: StorageVersion, name: str) -> None:
        """A weight has been gathered. May be repeated."""
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
        """The bytes of a weight have been freed. May be repeated."""
        seen = self._tracer.tensors.get(version.id)
        if seen is not None and seen.open_at is not None:
            self._tracer.gone(version.id)
            seen.closes(len(self._tracer.points) - 1)

    @contextlib.contextmanager
    def hook(self, settles: bool) -> Iterator[None]:
        """A context around a hook that the recorder does not see. `settles`: it has freed the buffers of its collectives at its
        end.
        """
        tracer = self._tracer
        if not tracer.forward_over or not backward_runs():
            yield
            return
        tracer.backward_begins()
        with unrecorded_op(tracer, f"{HOOK}unit" if settles else LATE_HOOK, frees=True):
            yield
